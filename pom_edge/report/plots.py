"""How figures are drawn: by matplotlib, as SVG with real text, in the colours of the page, light or dark.

A figure is 360 units wide: a phone of 360 pixels shows it at nine tenths, where its text is still 12 pixels high, and a window
at six fifths (page.css). Colours are drawn as placeholders and then named after the page's CSS variables, so that one figure
fits both themes.
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pom_edge.errors import require
from pom_edge.report.markup import Html, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.0  # inches of 72 units
TEXT = 13.5  # units: 12.3 pixels where a phone of 360 shows 328 of them
ROW = 0.3  # of one bar, with its distance to the next
LETTER = 0.58  # mean width of one, in heights of the text
AXIS = 0.75  # of the figure's width, beside the labels of the other axis
SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
# placeholder -> variable of page.css; matplotlib writes black as no colour at all, so none is black
COLOURS = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--gate",
    "#050505": "--paper",
    **{f"#0a0a0{number}": f"--s{number}" for number in range(1, 7)},
}
INK, MUTED, LINE, GATE, PAPER, *SERIES = COLOURS
MARKERS = "osD^vP"
STYLE: Any = {  # a dictionary, whose keys are typed one by one in some versions
    "svg.fonttype": "none",
    "svg.hashsalt": "pom-edge",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same layout everywhere
    "font.size": TEXT,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelsize": TEXT,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": TEXT,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}
__all__ = [
    "GATE",
    "MARKERS",
    "MUTED",
    "PAPER",
    "ROW",
    "SERIES",
    "against_tokens",
    "bars",
    "beside",
    "check_library",
    "legend",
    "limit",
    "mark",
    "mark_label",
    "new_figure",
    "powers_of_ten",
    "room_beside",
    "rows_down",
    "shortened",
    "styled",
    "to_svg",
]


def check_library() -> None:
    """Refuse to begin where there is nothing to draw with.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "report")


@contextmanager
def styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # only its width is guessed: text stays text
        yield


def new_figure(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no state, no window

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    return figure, axes


def shortened(name: str, limit: int = 22) -> str:
    """The end of a long path says more than its beginning."""
    name = plain(name)
    return name if len(name) <= limit else f"…{name[1 - limit :]}"


def rows_down(axes: Axes, count: int) -> None:
    """Rows from the top. Below them the words of the axis (loc="right") may reach to the left, under the names."""
    axes.set_ylim(count - 0.4, -0.6)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def bars(axes: Axes, rows: Sequence[tuple[str, float, float | None, str]], form: str) -> None:
    """Name, value, mark and colour of each bar."""
    for y, (_, value, marked, colour) in enumerate(rows):
        axes.barh(y, value, height=0.55, color=colour)
        if marked is not None:
            mark(axes, marked, y, 0.36)
        beside(axes, max(value, marked or 0.0), y, form.format(value))
    axes.set_yticks(range(len(rows)), [shortened(name) for name, *_ in rows])
    rows_down(axes, len(rows))
    room_beside(axes, max(max(value, marked or 0.0) for _, value, marked, _ in rows))


def mark(axes: Axes, x: float, y: float, half: float) -> None:
    for colour, width in ((PAPER, 5.0), (GATE, 2.4)):  # set off from a bar of whatever colour
        axes.plot([x, x], [y - half, y + half], color=colour, linewidth=width, solid_capstyle="butt")


def mark_label(axes: Axes, text: str) -> None:
    axes.plot([], [], color=GATE, linewidth=2.4, label=text)


def limit(draw: Any, value: float, label: str | None) -> None:
    draw(value, color=GATE, linewidth=1.4, linestyle=(0, (5, 3)), label=label)


def beside(axes: Axes, x: float, y: float, text: str) -> None:
    note = axes.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", va="center")
    note.set_in_layout(False)  # room for it is made within the axes, not beside them: see room_beside


def room_beside(axes: Axes, largest: float) -> None:
    """End the horizontal axis of bars, the longest of which is ``largest``, where every figure beside them fits."""
    figure: Any = axes.figure
    axes.set_xlim(0, largest or 1.0)
    figure.draw_without_rendering()  # lays it out: names on the left take what they take
    box, shares = axes.get_window_extent(), [0.95]
    for note in axes.texts:
        words, start = note.get_window_extent(), axes.transData.transform(note.xy)[0]  # type: ignore[attr-defined]
        reach = words.x1 - start  # from the end of the bar, whatever the scale
        if start > box.x0:
            shares.append((box.width - reach) / (start - box.x0))
    axes.set_xlim(0, (largest or 1.0) / max(min(shares), 0.1))


def against_tokens(axes: Axes, lengths: Iterable[int], unit: str, log: bool = True) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    _ticks(axes, sorted(lengths), AXIS * WIDTH)
    axes.set_xlabel("tokens")
    axes.set_ylabel(textwrap.fill(unit, 18))  # the axis of a small figure has room for no more
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
        axes.yaxis.set_minor_formatter(lambda *_: "")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.grid(axis="y")


def powers_of_ten(axes: Axes) -> None:
    """Ticks of a horizontal axis that becomes logarithmic; whatever stands on its left is drawn already."""
    axes.set_xscale("log")
    figure: Any = axes.figure
    figure.draw_without_rendering()
    low, high = map(math.log10, axes.get_xlim())
    _ticks(
        axes,
        [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)],
        axes.get_window_extent().width / figure.dpi,
    )


def _ticks(axes: Axes, values: Sequence[float], width: float) -> None:
    """As many of the ascending values as have room on a logarithmic axis of so many inches, the last one among them."""
    low, high = map(math.log, axes.get_xlim())
    unit = 72 * width / max(high - low, 1e-9)
    kept: list[tuple[float, str]] = []
    for value in values[::-1]:
        words = f"{value:,.0f}" if value >= 1 else f"{value:g}"
        room = (len(words) + len(kept[-1][1])) / 2 * LETTER * TEXT + TEXT / 2 if kept else 0.0
        if not kept or (math.log(kept[-1][0]) - math.log(value)) * unit >= room:
            kept.append((value, words))
    axes.set_xticks([value for value, _ in kept], [words for _, words in kept])
    axes.set_xticks([], minor=True)


def legend(figure: Figure) -> None:
    names = [name for axes in figure.axes for name in axes.get_legend_handles_labels()[1]]
    if names:
        handles = 2 * 2.6 * TEXT + 1.4 * TEXT  # two of them with their distance to the words, and the space between columns
        columns = 2 if 2 * max(map(len, names)) * LETTER * TEXT + handles <= 72 * WIDTH else 1
        lines = -(-len(names) // columns)
        figure.set_figheight(figure.get_figheight() + (lines - 1) * ROW)  # the rows below keep theirs
        figure.legend(loc="outside upper left", ncols=columns, columnspacing=1.4, handlelength=1.8)


def to_svg(figure: Figure, key: str, title: str) -> Html:
    """The figure as an element of the page.

    Names of parts are made unique by ``key``: two figures of one page would share them otherwise.
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ET.register_namespace("", SVG)
    root = ET.fromstring(text.getvalue())  # noqa: S314  # made in the line above
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):  # a style of a figure would be one of the page
                parent.remove(child)
    for node in root.iter():
        _name_parts(node, key)
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    del root.attrib["width"], root.attrib["height"]  # the page decides
    root.set("role", "img")
    root.set("aria-labelledby", f"{key}-title")
    label = ET.Element(f"{{{SVG}}}title", {"id": f"{key}-title"})
    label.text = title
    root.insert(0, label)
    return Html(ET.tostring(root, encoding="unicode"))


def _name_parts(node: ET.Element, key: str) -> None:
    for name, value in list(node.attrib.items()):
        if name == "id":
            node.set(name, f"{key}-{value}")
        elif name == LINK:
            del node.attrib[name]
            node.set("href", f"#{key}-{value[1:]}")
        else:
            value = value.replace("url(#", f"url(#{key}-")
            for placeholder, variable in COLOURS.items():
                value = value.replace(placeholder, f"var({variable})")
            node.set(name, value)

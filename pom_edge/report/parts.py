"""Parts that the sections of a page are made of, and how figures read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pom_edge.report.markup import Html, element

h = element
NONE = "-"


def pair(text: Sequence[Html | None], svg: Html | None) -> Html:
    """Words and their figure, side by side where there is room."""
    return h("div", h("div", *text), h("figure", svg) if svg is not None else None, class_="pair")


def details(title: str, child: Html) -> Html:
    return h("details", h("summary", title), h("div", child))


def facts(rows: Iterable[tuple[str, object]]) -> Html:
    return h("dl", *(part for key, value in rows for part in (h("dt", key), h("dd", value))), class_="facts")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], numeric: set[int]) -> Html:
    """The first cell of a row is its heading. Roles are said aloud: as blocks, on a phone, the elements lose them."""
    head = [h("th", name, scope="col", role="columnheader", class_=_kind(index, numeric)) for index, name in enumerate(headers)]
    body = []
    for first, *rest in rows:
        cells = [h("th", first, scope="row", role="rowheader", class_=_kind(0, numeric))]
        for index, value in enumerate(rest, 1):
            content = value if isinstance(value, Html) else h("span", value)
            cells.append(h("td", content, role="cell", class_=_kind(index, numeric), data_label=headers[index]))
        body.append(h("tr", *cells, role="row"))
    top = h("thead", h("tr", *head, role="row"), role="rowgroup")
    return h("table", top, h("tbody", *body, role="rowgroup"), role="table")


def _kind(index: int, numeric: set[int]) -> str | None:
    return "number" if index in numeric else None


def verdict(held: bool) -> Html:
    return h("span", "held" if held else "missed", class_="good" if held else "bad")


def db(value: Any, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}f} dB"


def ms(value: float | None) -> str:
    return NONE if value is None else f"{value:,.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def moment(text: str) -> str:
    return text.replace("T", " ").replace("+00:00", " UTC")

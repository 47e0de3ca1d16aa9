"""HTML as values: what is text is escaped, what is markup says so by its type. Nothing is markup by accident."""

from __future__ import annotations

import html
import re

# What XML 1.0 and HTML do not allow, not even escaped: a name in a manifest may hold any of it.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = ("br", "col", "link", "meta")

__all__ = ["Html", "element", "plain"]


class Html(str):
    """Markup, made by :func:`element`; any other string is text."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """One element: children that are not :class:`Html` are escaped, so are all attributes.

    Args:
        tag: its name.
        children: text, numbers or markup, in order; None is left out.
        attributes: ``class_`` is ``class``, ``aria_label`` is ``aria-label``; True is an attribute without a value, None and
            False leave it out.

    Example:
        >>> element("a", "R & D", href="#x")
        '<a href="#x">R &amp; D</a>'
    """
    named = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{named}>")
    return Html(f"<{tag}{named}>{''.join(_child(child) for child in children if child is not None)}</{tag}>")


def plain(text: object) -> str:
    """As text that may stand in HTML and SVG: characters that neither allows are replaced."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", str(text))


def _child(child: object) -> str:
    return child if isinstance(child, Html) else html.escape(plain(child), quote=False)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(plain(value))}"'

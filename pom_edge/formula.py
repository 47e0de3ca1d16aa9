"""Sizes as formulas of the free axes (``32*(tokens//32) + 64``), evaluated without running anything as code."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from pom_edge.errors import InputError

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": max,
    "Min": min,
    "max": max,
    "min": min,
    "CeilToInt": math.ceil,
    "ceiling": math.ceil,
    "floor": math.floor,
    "FloorToInt": math.floor,
    "IntTrueDiv": operator.truediv,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
}

__all__ = ["evaluate"]


def evaluate(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a formula.

    Args:
        formula: of integers, names, arithmetic, and the functions that torch's symbolic shapes use.
        sizes: values of the names.

    Raises:
        InputError: a name without a value, or anything else in it.
    """

    def walk(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return walk(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node.value
        if isinstance(node, ast.Name) and node.id in sizes:
            return sizes[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.left), walk(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](walk(node.operand))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*map(walk, node.args))
        raise InputError(f"{formula!r} is no size of {', '.join(sizes) or 'nothing'}")

    return int(walk(_parsed(formula)))


@functools.lru_cache(maxsize=4096)
def _parsed(formula: str) -> ast.Expression:
    try:
        return ast.parse(formula, mode="eval")
    except SyntaxError:
        raise InputError(f"{formula!r} is not a formula") from None

"""What a Core ML package is fixed at where no option says otherwise, and the note that tells so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pom_edge.extent import Extent
from pom_edge.words import counted

if TYPE_CHECKING:
    from pom_edge.options import ExportOptions
    from pom_edge.subject import Subject

__all__ = ["own_batch", "shape_notes"]


def own_batch(subject: Subject) -> int:
    """One sequence, unless a ``.pt2`` was traced for another number."""
    first = next(iter(_program_shapes(subject).values()), ())
    return first[0] if first and isinstance(first[0], int) else 1


def shape_notes(options: ExportOptions, fixed: ExportOptions, subject: Subject) -> list[str]:
    """What was fixed although no option said so, and which options say otherwise; empty where nothing was.

    Args:
        options: as asked for.
        fixed: what :func:`pom_edge.coreml.coreml_options` made of them.
        subject: whose axes they are.
    """
    from pom_edge.export.inputs import BATCH, CONTEXT, TOKENS, axis_sizes, plan_axes

    example, traced = dict(subject.example), _program_shapes(subject)
    axes = plan_axes(example, Extent(), Extent())
    free = {  # what a .pt2 was traced for stays so on every target
        name: {d for d, size in zip(dims, traced.get(name, dims), strict=True) if not isinstance(size, int)}
        for name, dims in axes.items()
    }
    names = set().union(*free.values())
    own_number = options.batch is None and BATCH in names
    if options.tokens is not None or fixed.tokens is None or TOKENS not in names:
        text = f"coreml: fixed at a batch of {fixed.batch}; --batch N chooses another"
        text += ", and a session takes any number, one part after the other" if options.form == "parallel" else ""
        return [text] if own_number and not traced and options.form != "streamed" else []
    own = "config" in subject.info and options.example is None  # then the example is made up, whatever the samples are
    step = " a step" if options.form == "recurrent" else " (the default length)" if own else " (as in the example)"
    said = [counted(int(fixed.tokens), "token") + step]
    if CONTEXT in names:
        said.append(f"a context of {axis_sizes(example, axes)[CONTEXT]}")
    if own_number:
        said.append(counted(int(fixed.batch or 1), "sequence"))
    if traced:
        choice = "a .pt2 takes no --tokens: give an --example of another length, or export the model that it was traced from"
    else:
        choice = _choices(options, several=sum(TOKENS in dims for dims in free.values()) > 1)
        choice += ", --batch N more sequences" if own_number else ""
    return [f"coreml: fixed at {' and '.join(said)}; {choice}"]


def _choices(options: ExportOptions, several: bool) -> str:
    """What --tokens takes here; ``several`` inputs of listed lengths need iOS18."""
    recurrent, alone = options.form == "recurrent", set(options.targets) == {"coreml"}
    ways = ["N"]
    if alone and not options.stateful:
        ways.append("a list (1,64)" if recurrent else "a list (64,256; from iOS18 on)" if several else "a list (64,256)")
    if not recurrent:
        ways.append("MIN:OPT:MAX")
    listed = " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))
    return f"--tokens {listed} chooses others{'' if alone else ', for every target'}"


def _program_shapes(subject: Subject) -> dict[str, tuple[Any, ...]]:
    """Shapes of a ``.pt2``'s inputs, free axes as symbols; empty where the subject is a module."""
    if subject.program is None:
        return {}
    names = subject.program.graph_signature.user_inputs
    nodes = (node for node in subject.program.graph.nodes if node.op == "placeholder" and node.name in names)
    return dict(zip(subject.example, (tuple(node.meta["val"].shape) for node in nodes), strict=False))

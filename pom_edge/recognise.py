"""The published PoM class inside a user's model, known by its parameters and attributes rather than by its import path.

A copy of the published file in somebody's repository is the same layer; the class is never imported. What is recognised is
rebuilt as a :class:`pom_edge.mixer.PoM` that carries the same tensors.
"""

from __future__ import annotations

from torch import Tensor, nn

from pom_edge.errors import CheckpointError, InputError
from pom_edge.mixer import Mixer, PoM
from pom_edge.tables import TABLE_NAMES, read_base, rotary_of

ATTRIBUTES = ("dim", "order", "order_expand", "n_groups", "n_sel_heads")  # what the published constructor sets
PUBLISHED_CLAMP = 6.0

__all__ = ["is_published", "to_pom"]


def is_published(module: nn.Module) -> bool:
    """Whether a module is the published PoM or PoMRoPE: its parameters and its attributes, not its name."""
    if isinstance(module, Mixer) or not all(isinstance(getattr(module, name, None), int) for name in ATTRIBUTES):
        return False
    own = {name for name, _ in module.named_parameters()}
    projections = {"qc_proj.weight", "se_bias"} if getattr(module, "n_groups", 1) == 1 else {"po_proj.weight", "se_proj.weight"}
    return {"po_coeff", "ag_proj.weight"} | projections <= own


def to_pom(module: nn.Module) -> PoM:
    """The equivalent layer of ours with the same tensors.

    The upper bound of the activation is the published 6, unless the module has an attribute ``clamp_max``: the bound is
    written into the published function and leaves no trace in the module.

    Raises:
        InputError: the module's settings and tensors contradict each other.
    """
    tensors: dict[str, Tensor] = dict(module.state_dict())
    # Buffers that were registered as non-persistent are tables all the same.
    tensors |= {name: value for name, value in module.named_buffers() if name in TABLE_NAMES}
    hidden = int(module.dim) * int(module.order_expand)  # type: ignore[arg-type]
    try:
        rotary = rotary_of(set(tensors))
        base = 10000.0 if rotary is None else read_base(tensors, rotary, hidden)
        mixer = PoM(
            int(module.dim),  # type: ignore[arg-type]
            int(module.order),  # type: ignore[arg-type]
            int(module.order_expand),  # type: ignore[arg-type]
            n_groups=int(module.n_groups),  # type: ignore[arg-type]
            n_sel_heads=int(module.n_sel_heads),  # type: ignore[arg-type]
            bias="ag_proj.bias" in tensors,
            rotary=rotary,
            rotary_base=base,
            clamp_max=float(getattr(module, "clamp_max", PUBLISHED_CLAMP)),
        )
        mixer.load_state_dict({name: value for name, value in tensors.items() if name not in TABLE_NAMES})
    except (CheckpointError, RuntimeError) as error:
        raise InputError(f"{type(module).__name__} looks like the published PoM, but cannot be rebuilt: {error}") from error
    return mixer.to(next(module.parameters()).dtype).train(module.training)

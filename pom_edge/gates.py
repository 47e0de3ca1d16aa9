"""The parity waterfall: PyTorch, lowered, ONNX, typed: every output and every mixer's own output, stage by stage.

A gate is held at each stage, and shown to be able to fail: each mixer zeroed in turn, the outputs zeroed and permuted. Residual
networks hide a dead mixer (75 dB at the output of a fresh four-block model), so mixers are compared one by one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pom_edge.errors import GateError, InputError, PomError
from pom_edge.metric import Metric, Run, runner
from pom_edge.runtimes.parity import (
    GATES_DB,
    Arrays,
    Metrics,
    Vacuity,
    compare,
    measure,
    prove_not_vacuous,
    summarise,
    worst,
)
from pom_edge.runtimes.session import open_session
from pom_edge.runtimes.stepping import Execute, run_rows

if TYPE_CHECKING:
    from pom_edge.export.forms import Plan
    from pom_edge.export.golden import Case

Stage = dict[str, Metrics]
STAGES = {
    "lowered": "the lowered PyTorch model",
    "onnx": "the ONNX graph in ONNX Runtime",
    "typed": "the typed graph",
    "rounded": "the typed graph with every operator rounded",
    "eager": "the quantized PyTorch model",
    "quantized": "the quantized graph",
    "coreml": "the Core ML program",
}

__all__ = ["Stage", "against", "against_graph", "hold_metric", "hold_stage", "missed", "parity_entry", "prove_gate"]


def hold_stage(stage: str, metrics: Stage, gate_db: float, plan: Plan, outputs: list[str]) -> None:
    """Every output and mixer of a stage holds its gate.

    Raises:
        InputError: the traced model is not the model, so it has no such form.
        GateError: a value misses the gate; says which and by how much.
    """
    failed = missed(metrics, gate_db)
    if not failed:
        return
    fp32 = GATES_DB["fp32"]
    if stage in ("lowered", "onnx") and all(m.passes(fp32) for m in failed.values()):
        lowest = min(failed.values(), key=lambda m: m.snr_db)
        raise GateError(
            f"--snr {gate_db:g} asks for more than FP32 rounding leaves here: {lowest.snr_db:.1f} dB. The FP32 gate of "
            f"{fp32:g} dB holds; give --snr {math.floor(lowest.snr_db)} or less"
        )
    if stage == "lowered" and plan.form != "parallel":
        raise InputError(_other_interaction(plan.form, failed))
    listed = ", ".join(
        f"{'output' if name in outputs else 'mixer'} {name} {m.snr_db:.1f} dB"
        + (f" ({m.nonfinite} NaN/Inf)" if m.nonfinite else "")
        for name, m in list(failed.items())[:6]
    )
    raise GateError(
        f"{STAGES[stage]} is not the model: {listed}; the gate is {gate_db:g} dB. First stage that differs: {stage}"
    )


def missed(metrics: Stage, gate_db: float) -> Stage:
    """The values that miss a gate."""
    return {name: m for name, m in metrics.items() if not m.passes(gate_db)}


def parity_entry(
    stages: dict[str, Stage], gate_db: float, outputs: list[str], vacuity: list[Vacuity], eager_db: float | None = None
) -> dict[str, Any]:
    """What an artifact's manifest says of its parity: the figures of the last stage, and one of each stage."""
    last = list(stages.values())[-1]
    found = worst([last[name] for name in outputs])
    layers = {name: m.snr_db for name, m in last.items() if name not in outputs}
    name = min(layers, key=lambda key: layers[key]) if layers else None
    return {
        "snr_db": round(found.snr_db, 2),
        "gate_db": gate_db,
        "snr_db_eager": eager_db,
        "worst_mixer": None if name is None else {"name": name, "snr_db": round(layers[name], 2)},
        "mixers": {key: round(snr_db, 2) for key, snr_db in layers.items()},
        "cosine": found.cosine,
        "max_rel": found.max_rel,
        "nonfinite": found.nonfinite,
        "top1": found.top1,
        "stages": {stage: round(worst(list(metrics.values())).snr_db, 2) for stage, metrics in stages.items()},
        "vacuity": [{"test": v.test, "caught": v.caught, "note": v.note} for v in vacuity],
        "passed": True,
    }


def torch_points(metric: Metric, plan: Plan) -> float:
    """The metric of PyTorch's model, which zeros must not reach.

    Raises:
        GateError: they do; the metric is vacuous.
    """
    return metric.reference(_torch_run(plan), _torch_run(plan, ""))


def _torch_run(plan: Plan, zeroed: str | None = None) -> Run:
    return runner(lambda inputs: plan.reference.run(inputs, zeroed)[0], plan.dtypes)


def form_run(execute: Execute, plan: Plan, outputs: list[str]) -> Run:
    """Something that executes a form in PyTorch, for a metric: whole sequences, in one chunk."""

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        lengths = [inputs[name].shape[axis] for name, axis in plan.token_axes.items() if name in inputs]
        values = run_rows(lambda part: plan.through(execute, part, lengths[:1]), inputs, rows)
        return {name: values[name] for name in outputs}

    first = next(iter(plan.axes.values()))[0]
    rows = first if isinstance(first, int) else None

    return runner(run, plan.dtypes)


def hold_metric(metric: Metric, folder: Path, plan: Plan, file: str) -> dict[str, Any]:
    """The task metric of the bundle in ``folder`` beside PyTorch's.

    Raises:
        GateError: it drops further than it may, or is vacuous.
    """
    points = torch_points(metric, plan)
    with open_session(folder, artifact=file) as session:
        entry = metric.compare(points, metric.of(session.run))
    if not entry["passed"] and (again := metric.of(_torch_run(plan))) != points:
        raise InputError(f"--metric: {metric.name} is not repeatable: PyTorch's model had {points:g} points and now {again:g}")
    if not entry["passed"]:
        raise GateError(
            f"{metric.name} drops from {entry['pytorch']:g} to {entry['artifact']:g} points in {file}, more than "
            f"{metric.max_drop:g}; allow it by --max-drop, or keep a higher precision"
        )
    return entry


def prove_gate(
    cases: list[Case], reference: Any, mixers: list[str], gate_db: float, dead: dict[str, Arrays] | None = None
) -> list[Vacuity]:
    """Zero each mixer in turn, zero and permute the outputs: the gate must notice every one.

    Args:
        cases: recorded inputs and answers; the smallest is run with each mixer zeroed.
        reference: PyTorch's model.
        mixers: module paths.
        gate_db: the gate under test.
        dead: answers with each mixer zeroed, filled here: gates of several precisions share them.

    Raises:
        GateError: it does not; the gate would pass a broken model.
    """
    dead = {} if dead is None else dead
    case = min(cases, key=lambda c: c.nbytes)
    true = _merged((case.outputs, case.taps))
    results: list[Vacuity] = []
    for name in mixers:
        taps = [true[key] for key in true if key.split("#")[0] == name]
        if name and not taps:
            results.append(Vacuity(f"zeroed mixer {name}", None, "it does not run for these inputs"))
            continue
        taps = taps or list(case.outputs.values())
        if not any(np.any(tap) for tap in taps):
            results.append(Vacuity(f"zeroed mixer {name}", None, "its output is zero already"))
            continue
        if name not in dead:
            dead[name] = _merged(reference.run(case.inputs, zeroed=name))
        results.append(Vacuity(f"zeroed mixer {name}", not compare(true, dead[name], gate_db).passed))
    of_outputs = [result for each in cases for result in prove_not_vacuous(each.outputs, gate_db)]
    results = summarise([*results, *of_outputs])
    if not any(result.caught for result in of_outputs):
        raise GateError(
            "PyTorch's own answers are zero, or the same for every token and sample, so no comparison could fail and none "
            "proves "
            "anything. Is the model trained, and does its output depend on its input?"
        )
    missed = [result.test for result in results if result.caught is False]
    if missed:
        raise GateError(
            f"the parity gate of {gate_db:g} dB is vacuous: it does not notice {', '.join(missed)}. "
            "The example inputs do not exercise the model; give real ones with --example"
        )
    return results


def against_graph(cases: list[Case], plan: Plan, execute: Execute) -> Stage:
    """:func:`against`, for graphs that a runtime executes.

    Raises:
        GateError: it does not run at one of the sizes.
    """
    try:
        return against(cases, plan, execute)
    except PomError:
        raise
    except Exception as error:  # onnxruntime's own exceptions: the graph does not run at one of the sizes
        tried = "; ".join(case.description for case in cases)
        raise GateError(
            f"the graph does not run at every size ({tried}): {str(error).splitlines()[0]}. If the model fixes its token "
            "count, export with --tokens N"
        ) from error


def against(cases: list[Case], plan: Plan, execute: Execute) -> Stage:
    """The worst figures of every value over all cases."""
    collected: dict[str, list[Metrics]] = {}
    for case in cases:
        values = plan.through(execute, case.inputs, case.chunks)
        for name, expected in _merged((case.outputs, case.taps)).items():
            collected.setdefault(name, []).append(_measured(name, case, expected, values[name]))
    return {name: worst(metrics) for name, metrics in collected.items()}


def _other_interaction(form: str, missed: dict[str, Metrics]) -> str:
    name, metrics = next(iter(missed.items()))
    found = f"{metrics.nonfinite} NaN or infinity" if metrics.nonfinite else f"{metrics.snr_db:.1f} dB"
    return (
        f"chunk by chunk the model computes something else ({name}: {found}), so its tokens interact in "
        "another way than through PoM: an attention, a convolution or a mean over tokens, or positions that it counts from 0. "
        f"It has no {form} form; --form parallel exports it as it is"
    )


def _measured(name: str, case: Case, expected: np.ndarray, value: np.ndarray) -> Metrics:
    if expected.shape != value.shape:
        raise GateError(
            f"{name} has shape {value.shape} for {case.description}, PyTorch answers {expected.shape}: a free axis is not "
            "free in this model. Fix it with --tokens N or --batch N"
        )
    return measure(expected, value)


def _merged(pair: tuple[Arrays, Arrays]) -> dict[str, np.ndarray]:
    return {**pair[0], **pair[1]}

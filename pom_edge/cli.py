"""The command line: arguments -> library calls -> tables or JSON. Thin on purpose; torch is imported only where needed."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pom_edge.bundle import MANIFEST, is_bundle
from pom_edge.errors import InputError, MissingToolError, PomError
from pom_edge.metric import Metric
from pom_edge.words import parse_lengths

if TYPE_CHECKING:
    import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
ROUNDS = 15  # timed runs of each artifact

app = typer.Typer(
    name="pom-edge",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Bundle = Annotated[Path, typer.Argument(help="A .pom bundle.", show_default=False)]
Runtime = Annotated[
    str | None,
    typer.Option(help="ort, ort-cuda, ort-trt (ONNX Runtime), coreml, trt, rtx (engines).  [default: the artifact's own]"),
]
Artifact = Annotated[str | None, typer.Option(help="File name of the artifact, when the bundle holds several.")]
Spill = Annotated[Path | None, typer.Option(help="Streamed: folder for the tokens between passes (default: in memory).")]
Threads = Annotated[int | None, typer.Option(help="Threads for the runtime; default: its own choice.", min=1)]


_CLICK_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")  # typer hides it
_ABORT: Any = typer.Abort  # what click makes of a Ctrl-C


def _reported(command: F) -> F:
    """A user's mistake is one message and an exit code; a bug keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be answered
            return result
        except PomError as error:
            if _was_interrupted(error):  # torch turns a Ctrl-C while it traces into an error of its own
                _interrupted(kwargs.get("as_json", False))
            _fail(str(error), error.exit_code, kwargs.get("as_json", False))
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of a pipe went away (`pom-edge info ... | head`)
            raise typer.Exit(0) from None
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate memory" not in str(error):  # torch's way to say it
                raise
            _fail("not enough memory for this; close other programs, or give smaller inputs", 2, kwargs.get("as_json", False))
        except OSError as error:
            if not _to_stdout(error):
                raise
            _fail(f"the output cannot be written: {error.strerror}", 2, False)
        except KeyboardInterrupt:
            _interrupted(kwargs.get("as_json", False))

    return run  # type: ignore[return-value]


_received: list[int] = []  # signals that ended what was going on


def _end_like_ctrl_c(number: int, _frame: object) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def _handle_signals() -> None:
    """``kill PID`` and a closed terminal end a command as Ctrl-C does: what is half done is cleaned up."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _end_like_ctrl_c)


def _interrupted(as_json: bool) -> None:
    number = _received[-1] if _received else signal.SIGINT
    _fail("interrupted; nothing was changed", 128 + number, as_json)


def _was_interrupted(error: BaseException | None) -> bool:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return any(isinstance(link, KeyboardInterrupt) or "KeyboardInterrupt" in str(link) for link in chain)


def _to_stdout(error: OSError) -> bool:
    """Whether writing to stdout failed, as on a full disk: errors about files name them."""
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has nowhere to go: no second error at exit
    return True


def _check_output(output: Path, source: Path, bundle: Path) -> None:
    """Refuse to write over the inputs, or into a bundle: its files are hashed.

    Raises:
        InputError: either.
    """
    target = output.resolve()
    if target == source.resolve():
        raise InputError(f"--output {output} is the input file; expected another name, so that the inputs are kept")
    if any((folder / MANIFEST).is_file() for folder in (bundle.resolve(), *target.parents) if folder in target.parents):
        raise InputError(f"--output {output} lies inside a bundle, whose files are hashed; expected a place outside")


def _fail(message: str, code: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"passed": False, "error": message, "exit_code": code}, indent=2))
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pom-edge {version('pom-edge')}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)]


@app.callback()
def _root(show_version: Version = False) -> None:
    """Trained PoM models in, verified artifacts for edge runtimes out."""


@app.command("export")
@_reported
def export_command(
    model: Annotated[
        Path, typer.Argument(help="model.pt, .safetensors, .ckpt or .pt2; a .pom gets engines", show_default=False)
    ],
    target: Annotated[list[str] | None, typer.Option(help="onnx, coreml, trt, rtx (repeatable).  [default: onnx]")] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="fp32, fp16, bf16, int8, w8, w4; coreml: p8, p6, p4, w8a8 (its int8 is w8) (repeatable).  "
            "[default: onnx fp32, others fp16]"
        ),
    ] = None,
    form: Annotated[
        str | None, typer.Option(help="parallel, recurrent (chunk by chunk) or streamed (fixed memory).  [default: parallel]")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="N fixes the token count, MIN:OPT:MAX bounds it, N,M,.. lists it (coreml); default: free."),
    ] = None,
    batch: Annotated[str | None, typer.Option(help="N or MIN:OPT:MAX; default: free.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Streamed: tokens of a chunk.  [default: measured]")] = None,
    mask: Annotated[
        str, typer.Option(help="Layers: none, padding, causal. Encoders: padding. Recurrent: padding (ragged), frames.")
    ] = "none",
    factory: Annotated[str | None, typer.Option(help="module:callable that returns the nn.Module.")] = None,
    example: Annotated[str | None, typer.Option(help="Example inputs: FILE (.npz, .safetensors) or module:callable.")] = None,
    layout: Annotated[str | None, typer.Option(help="Published layers: name of the checkpoint layout.")] = None,
    degree: Annotated[int | None, typer.Option(help="Published layers: polynomial degree, where shapes do not tell.")] = None,
    clamp: Annotated[float | None, typer.Option(help="Published layers: upper bound of the activation (6, or 1).")] = None,
    unsafe_pickle: Annotated[bool, typer.Option("--unsafe-pickle", help="Load a pickled module: runs code from it.")] = False,
    snr: Annotated[float | None, typer.Option(help="Raise the parity gate to this many dB.")] = None,
    metric: Annotated[str | None, typer.Option(help="module:function(run) -> points of the task, compared too.")] = None,
    max_drop: Annotated[float | None, typer.Option(help="Points that the metric may lose.  [default: 0.5]")] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="INT8 (coreml: w8a8): FILE, folder, module:callable, or golden (the checkpoint's samples)."),
    ] = None,
    observer: Annotated[str, typer.Option(help="INT8 ranges: minmax, percentile or mse.")] = "percentile",
    int8_weights: Annotated[str, typer.Option(help="8bit, or 7bit for x86 without VNNI at full speed.")] = "8bit",
    remainder: Annotated[str, typer.Option(help="INT8, w8, w4: what all else computes in, fp32 or fp16.")] = "fp32",
    minimum_deployment_target: Annotated[
        str | None, typer.Option(help="Core ML: iOS16, iOS17, iOS18 or macOS13 to macOS15.  [default: iOS17]")
    ] = None,
    stateful: Annotated[bool, typer.Option("--stateful", help="Core ML, recurrent: keep the state in the package.")] = False,
    author: Annotated[str | None, typer.Option(help="Of the model, for the metadata of its files.")] = None,
    license_: Annotated[str | None, typer.Option("--license", help="Of the model, likewise.")] = None,
    memory_budget: Annotated[
        str | None, typer.Option(help="Choose form and chunk to keep this much memory (512MiB) in a run of --tokens N.")
    ] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="rtx: GPU generation as 8.9 (repeatable).  [default: the GPU here, else 8.6 and 8.9]"),
    ] = None,
    workspace: Annotated[str | None, typer.Option(help="trt, rtx: scratch memory of kernels (512MiB).")] = None,
    optimization_level: Annotated[int | None, typer.Option(help="trt, rtx: 0 (fast build) to 5.")] = None,
    refit: Annotated[bool, typer.Option("--refit", help="trt, rtx: weights can be replaced; slower.")] = False,
    version_compatible: Annotated[bool, typer.Option("--version-compatible", help="trt: for later versions; slower.")] = False,
    hardware_compatible: Annotated[bool, typer.Option("--hardware-compatible", help="trt: for other GPUs; slower.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Bundle to write.  [default: <model>.pom beside the model]")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing bundle; in place: an engine of other shapes.")
    ] = False,
    as_json: Json = False,
    show_version: Version = False,  # noqa: ARG001  # its callback prints
) -> None:
    """Export a trained model to a bundle of verified artifacts."""
    from pom_edge.console import Progress, print_export
    from pom_edge.pipeline import ExportOptions, export_file, load_torch
    from pom_edge.runtimes.memory import parse_size

    if not is_bundle(model):
        load_torch()
    options = ExportOptions(
        targets=tuple(target or ["onnx"]),
        precisions=tuple(precision or ()),
        form=form,
        tokens=tokens,
        batch=batch,
        chunk=chunk,
        mask=mask,
        factory=factory,
        example=example,
        layout=layout,
        degree=degree,
        clamp=clamp,
        unsafe_pickle=unsafe_pickle,
        snr_db=snr,
        metric=metric,
        max_drop=max_drop,
        calibration=calibration,
        observer=observer,
        int8_weights=int8_weights,
        remainder=remainder,
        deployment_target=minimum_deployment_target,
        stateful=stateful,
        author=author,
        license=license_,
        memory_budget=None if memory_budget is None else parse_size(memory_budget, "--memory-budget"),
        compute_capability=tuple(compute_capability or ()),
        workspace=None if workspace is None else parse_size(workspace, "--workspace"),
        optimization_level=optimization_level,
        refit=refit,
        version_compatible=version_compatible,
        hardware_compatible=hardware_compatible,
        overwrite=overwrite,
    )
    # what a factory or a library prints does not belong into the JSON
    with Progress(quiet=as_json) as progress, contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):
        report = export_file(model, options, out=out, progress=progress.step)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_export(report)
    if report.missing:
        raise typer.Exit(MissingToolError.exit_code)


@app.command()
@_reported
def check(
    bundle: Bundle,
    runtime: Runtime = None,
    artifact: Artifact = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also compare every mixer; needs the onnx package.")] = False,
    metric: Annotated[str | None, typer.Option(help="module:function(run) -> points; compared with PyTorch's.")] = None,
    max_drop: Annotated[float | None, typer.Option(help="Points that the metric may lose.  [default: 0.5]")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Run every golden input through a runtime and compare with the PyTorch answers in the bundle."""
    from pom_edge.console import print_check
    from pom_edge.runtimes.checking import check_bundle

    if max_drop is not None and metric is None:
        raise InputError("--max-drop needs --metric module:function, whose points may drop")
    task = None if metric is None else Metric.named(metric, max_drop)
    report = check_bundle(bundle, runtime=runtime, artifact=artifact, layers=layers, threads=threads, metric=task)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_check(report)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
@_reported
def run(
    bundle: Bundle,
    input_file: Annotated[Path, typer.Option("--input", help=".npz, .npy or .safetensors with inputs by tensor name.")],
    output_file: Annotated[Path, typer.Option("--output", "-o", help="Where the outputs go, in the same formats.")],
    runtime: Runtime = None,
    artifact: Artifact = None,
    spill: Spill = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Run one artifact on inputs from a file. Streamed and spilled, .npy files are read and written in pieces."""
    import time

    import numpy as np

    from pom_edge.arrays import read_arrays, write_arrays
    from pom_edge.console import TokenProgress
    from pom_edge.runtimes import open_session

    _check_output(output_file, input_file, bundle)
    if spill is not None and input_file.suffix == output_file.suffix == ".npy":
        with open_session(bundle, runtime=runtime, artifact=artifact, threads=threads, spill=spill) as session:
            start = time.perf_counter()
            with TokenProgress(quiet=as_json) as progress:
                session.progress = progress.update
                shapes = session.run_file(input_file, output_file)
            seconds = time.perf_counter() - start
        for name in shapes:
            _warn_nonfinite(name, np.load(output_file, mmap_mode="r"))
        _say_run(output_file, shapes, seconds, session.runtime, as_json)
        return
    inputs = read_arrays(input_file)
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            print(f"warning: input {name!r} contains NaN or infinity", file=sys.stderr)
    with open_session(bundle, runtime=runtime, artifact=artifact, threads=threads, spill=spill) as session:
        if input_file.suffix == ".npy":  # its array has no name
            inputs = {session.inputs[0].name: inputs["x"]}
        start = time.perf_counter()
        with TokenProgress(quiet=as_json or session.artifact.stream is None) as progress:
            session.progress = progress.update
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", RuntimeWarning)
                outputs = session.run_named(inputs)
        seconds = time.perf_counter() - start
    for warning in said:
        print(f"warning: {warning.message}", file=sys.stderr)
    for name, array in outputs.items():
        _warn_nonfinite(name, array)
    write_arrays(output_file, outputs)
    _say_run(output_file, {name: list(array.shape) for name, array in outputs.items()}, seconds, session.runtime, as_json)


def _warn_nonfinite(name: str, array: np.ndarray) -> None:
    """Count NaN and infinity in pieces: the array may be a file longer than memory."""
    import numpy as np

    if array.dtype.kind != "f":
        return
    flat, piece = array.reshape(-1), 1 << 22
    bad = sum(int((~np.isfinite(flat[start : start + piece])).sum()) for start in range(0, flat.size, piece))
    if bad:
        print(f"warning: output {name!r} holds {bad:,} NaN or infinity of {flat.size:,} values", file=sys.stderr)


def _say_run(output_file: Path, shapes: dict[str, list[int]], seconds: float, runtime: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"output": str(output_file), "outputs": shapes, "seconds": seconds, "runtime": runtime}, indent=2))
    else:
        listed = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        print(f"{output_file}: {listed} ({1e3 * seconds:.1f} ms, {runtime})")


@app.command()
@_reported
def memory(
    bundle: Bundle,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of the whole run; of images: patches.  [default: the artifact's own number]", min=1),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    budget: Annotated[str | None, typer.Option(help="Bytes of the whole process: 512MiB, 500MB.")] = None,
    enforce: Annotated[bool, typer.Option("--enforce", help="Run under a limit of the system at the budget (Linux).")] = False,
    spill: Spill = None,
    runtime: Runtime = None,
    artifact: Artifact = None,
    threads: Threads = None,
    record: Annotated[bool, typer.Option("--record", help="Write the measurement into the bundle's manifest.")] = False,
    as_json: Json = False,
) -> None:
    """Predict and measure the memory of one run on random inputs; exit 1 over the budget."""
    from pom_edge.bundle import record_measurement
    from pom_edge.console import print_memory
    from pom_edge.inspection import machine_facts
    from pom_edge.runtimes.memory import check_budget, parse_size

    if enforce and budget is None:
        raise InputError("--enforce needs --budget SIZE, the limit to run under")
    report = check_budget(
        bundle,
        tokens,
        batch,
        budget=None if budget is None else parse_size(budget, "--budget"),
        enforce=enforce,
        artifact=artifact,
        runtime=runtime or "ort",
        spill=None if spill is None else str(spill),
        threads=threads,
    )
    if record:
        record_measurement(bundle, report.measurement(machine_facts(), spill is not None, threads))
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_memory(report)
        if record:
            print(f"recorded in {bundle / MANIFEST}")
    if not report.passed:
        raise typer.Exit(1)


@app.command("bench")
@_reported
def bench_command(
    bundle: Bundle,
    tokens: Annotated[
        str | None,
        typer.Option(help="Lengths, with commas.  [default: 256,1024,4096, or the length that artifacts are fixed at]"),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences.  [default: the smallest that is taken]", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Timed runs of each artifact.", min=1)] = ROUNDS,
    floor: Annotated[str | None, typer.Option(help="snr=DB,ratio=TIMES (FP32's time over the row's): exit 1 below.")] = None,
    runtime: Runtime = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Time every artifact that runs here, beside FP32 and beside its matrix products; memory in a fresh process."""
    from pom_edge.console import Progress, print_bench
    from pom_edge.inspection import machine_facts
    from pom_edge.runtimes.bench import bench

    with Progress(quiet=as_json) as progress:
        report = bench(
            bundle,
            None if tokens is None else parse_lengths(tokens, "--tokens"),
            batch,
            runtime=runtime or "ort",
            threads=threads,
            rounds=rounds,
            floor=_floors(floor),
            machine=machine_facts(),
            progress=progress.step,
        )
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_bench(report)
    _say_notes(report.notes)
    if not report.passed:
        raise typer.Exit(1)


@app.command("report")
@_reported
def report_command(
    bundle: Bundle,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file to write.  [default: <bundle>.html beside the bundle]")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Lengths, with commas.  [default: the artifacts' own, or 256,1024,4096]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences.  [default: the smallest that is taken]", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Timed runs of each artifact.", min=1)] = ROUNDS,
    no_bench: Annotated[bool, typer.Option("--no-bench", help="Measure nothing: only what the manifest says.")] = False,
    budget: Annotated[str | None, typer.Option(help="Memory that a run may take (512MiB), drawn beside it.")] = None,
    peers: Annotated[Path | None, typer.Option(help="JSON of a benchmark: the mixer beside published form, attention.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """One self-contained HTML page: parity, layers, latency, memory, ranges, environment."""
    from pom_edge.console import Progress
    from pom_edge.exchange import replace_file
    from pom_edge.report.collect import check_place, collect
    from pom_edge.report.page import render
    from pom_edge.report.peers import read_peers
    from pom_edge.report.plots import check_library
    from pom_edge.runtimes.memory import parse_size

    if no_bench and (tokens, batch, rounds, threads) != (None, None, ROUNDS, None):
        raise InputError("--no-bench measures nothing: leave --tokens, --batch, --rounds and --threads out")
    check_library()
    place = out if out is not None else bundle.resolve().with_suffix(".html")
    check_place(place, bundle)
    with Progress(quiet=as_json) as progress:
        report = collect(
            bundle,
            None if tokens is None else parse_lengths(tokens, "--tokens"),
            batch,
            threads=threads,
            rounds=rounds,
            measured=not no_bench,
            budget=None if budget is None else parse_size(budget, "--budget"),
            peers=None if peers is None else read_peers(peers),
            progress=progress.step,
        )
        progress.step("draw the page")
        text = render(report)
    replace_file(place, text.encode())
    left_out = [] if report.bench is None else [asdict(each) for each in report.bench.left_out]
    if as_json:
        made = {"report": str(place), "bytes": len(text.encode()), "measured": report.bench is not None, "left_out": left_out}
        print(json.dumps(made, indent=2))
    else:
        print(place)
    _say_notes([] if report.bench is None else report.bench.notes)


def _say_notes(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option} holds {text!r}; expected a number") from None


def _floors(text: str | None) -> dict[str, float]:
    """snr=40,ratio=1 -> {"snr": 40.0, "ratio": 1.0}."""
    pairs = [] if text is None else [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs) or len({name.strip() for name, _, _ in pairs}) < len(pairs):
        raise InputError(f"--floor is {text!r}; expected snr=DB, ratio=TIMES, or both with a comma, each once")
    return {name.strip(): _number(value, f"--floor {name.strip()}") for name, _, value in pairs}


@app.command()
@_reported
def info(
    path: Annotated[Path, typer.Argument(help="A bundle or a checkpoint.")],
    ranges: Annotated[
        bool, typer.Option("--ranges", help="Half precision: how large values get, and what stays FP32.")
    ] = False,
    trtexec: Annotated[bool, typer.Option("--trtexec", help="The trtexec command lines, for TensorRT 10 and 11.")] = False,
    raw: Annotated[Path | None, typer.Option(help="With --trtexec: write golden data as .bin files into this folder.")] = None,
    artifact: Artifact = None,
    as_json: Json = False,
) -> None:
    """What a bundle or a checkpoint holds."""
    from pom_edge.console import print_info
    from pom_edge.inspection import describe, describe_trtexec

    if not trtexec and (raw is not None or artifact is not None):
        raise InputError("--raw and --artifact are for --trtexec")
    facts = describe_trtexec(path, artifact, raw) if trtexec else describe(path, ranges)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_info(facts)


@app.command()
@_reported
def doctor(as_json: Json = False) -> None:
    """Which runtimes and compilers this machine has, and what is missing for which target."""
    from pom_edge.console import Progress, print_doctor
    from pom_edge.inspection import diagnose

    with Progress(quiet=as_json) as progress:
        facts = diagnose(progress.step)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_doctor(facts)


def main() -> None:
    """Entry point of ``pom-edge``."""
    _run(app, "pom-edge")


def export_main() -> None:
    """Entry point of ``pom-export``, which is ``pom-edge export``."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(no_args_is_help=True)(export_command)
    _run(single, "pom-export")


def _run(command: typer.Typer, name: str) -> None:
    """Run, with usage errors in the shape of all others: one line, and a JSON object where one was asked for."""
    _handle_signals()
    try:
        code = command(prog_name=name, standalone_mode=False)
    except _CLICK_ERROR as error:
        if not sys.argv[1:]:  # no argument at all: click raises the help
            error.show()
            sys.exit(error.exit_code)
        path = error.ctx.command_path if getattr(error, "ctx", None) else name
        text = error.format_message().rstrip(".")
        message = f"{text}{'' if text.endswith('?') else '.'} See: {path} --help"
        try:
            _fail(message, error.exit_code, "--json" in sys.argv)
        except typer.Exit as leave:
            code = leave.exit_code
    except (KeyboardInterrupt, _ABORT):  # before a command began, which answers by itself
        try:
            _interrupted("--json" in sys.argv)
        except typer.Exit as leave:
            code = leave.exit_code
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()

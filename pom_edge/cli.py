"""The command line: arguments -> library calls -> tables or JSON. Thin on purpose; torch is imported only where needed."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pom_edge.errors import PomError

F = TypeVar("F", bound=Callable[..., Any])

app = typer.Typer(
    name="pom-edge",
    help="Trained PoM models in, verified artifacts for edge runtimes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Bundle = Annotated[Path, typer.Argument(help="A .pom bundle.", show_default=False)]
Runtime = Annotated[str, typer.Option(help="Runtime that executes the artifact.")]
Artifact = Annotated[str | None, typer.Option(help="File name of the artifact, when the bundle holds several.")]
Threads = Annotated[int | None, typer.Option(help="Threads for the runtime; default: its own choice.", min=1)]


def _reported(command: F) -> F:
    """A user's mistake is one message and an exit code; a bug keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except PomError as error:
            _fail(str(error), error.exit_code, kwargs.get("as_json", False))
        except KeyboardInterrupt:
            _fail("interrupted; nothing was changed", 130, kwargs.get("as_json", False))
        except BrokenPipeError:
            raise typer.Exit(0) from None  # the reader of a pipe went away: `pom-edge info ... | head`

    return run  # type: ignore[return-value]


def _fail(message: str, code: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"passed": False, "error": message, "exit_code": code}, indent=2))
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


@app.command("export")
@_reported
def export_command(
    model: Annotated[Path, typer.Argument(help="model.pt, .safetensors, .ckpt or .pt2", show_default=False)],
    target: Annotated[list[str] | None, typer.Option(help="onnx (repeatable).  [default: onnx]")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="fp32 (repeatable).  [default: fp32]")] = None,
    form: Annotated[str, typer.Option(help="parallel: x -> y.")] = "parallel",
    tokens: Annotated[str | None, typer.Option(help="N fixes the token count, MIN:OPT:MAX bounds it; default: free.")] = None,
    batch: Annotated[str | None, typer.Option(help="N or MIN:OPT:MAX; default: free.")] = None,
    mask: Annotated[str, typer.Option(help="Published layers: none, padding or causal.")] = "none",
    factory: Annotated[str | None, typer.Option(help="module:callable that returns the nn.Module.")] = None,
    example: Annotated[str | None, typer.Option(help="Example inputs: FILE (.npz, .safetensors) or module:callable.")] = None,
    layout: Annotated[str | None, typer.Option(help="Published layers: name of the checkpoint layout.")] = None,
    degree: Annotated[int | None, typer.Option(help="Published layers: polynomial degree, where shapes do not tell.")] = None,
    clamp: Annotated[float | None, typer.Option(help="Published layers: upper bound of the activation (6, or 1).")] = None,
    unsafe_pickle: Annotated[bool, typer.Option("--unsafe-pickle", help="Load a pickled module: runs code from it.")] = False,
    snr: Annotated[float | None, typer.Option(help="Raise the parity gate to this many dB.")] = None,
    out: Annotated[Path | None, typer.Option(help="Bundle to write.  [default: <model>.pom beside the model]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing bundle.")] = False,
    as_json: Json = False,
) -> None:
    """Export a trained model to a bundle of verified artifacts."""
    from pom_edge.console import Progress, print_export
    from pom_edge.pipeline import ExportOptions, export_file, load_torch

    load_torch()
    options = ExportOptions(
        targets=tuple(target or ["onnx"]),
        precisions=tuple(precision or ["fp32"]),
        form=form,
        tokens=tokens,
        batch=batch,
        mask=mask,
        factory=factory,
        example=example,
        layout=layout,
        degree=degree,
        clamp=clamp,
        unsafe_pickle=unsafe_pickle,
        snr_db=snr,
        overwrite=overwrite,
    )
    with Progress(quiet=as_json) as progress:
        report = export_file(model, options, out=out, progress=progress.step)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_export(report)


@app.command()
@_reported
def check(
    bundle: Bundle,
    runtime: Runtime = "ort",
    artifact: Artifact = None,
    layers: Annotated[bool, typer.Option("--layers", help="Also compare every mixer; needs the onnx package.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Run every golden input through a runtime and compare with the PyTorch answers in the bundle."""
    from pom_edge.console import print_check
    from pom_edge.runtimes.checking import check_bundle

    report = check_bundle(bundle, runtime=runtime, artifact=artifact, layers=layers, threads=threads)
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
    output_file: Annotated[Path, typer.Option("--output", help="Where the outputs go, in the same formats.")],
    runtime: Runtime = "ort",
    artifact: Artifact = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Run one artifact on inputs from a file."""
    import time

    from pom_edge.arrays import read_arrays, write_arrays
    from pom_edge.runtimes import open_session

    inputs = read_arrays(input_file)
    with open_session(bundle, runtime=runtime, artifact=artifact, threads=threads) as session:
        start = time.perf_counter()
        outputs = session.run_named(inputs)
        seconds = time.perf_counter() - start
    write_arrays(output_file, outputs)
    shapes = {name: list(array.shape) for name, array in outputs.items()}
    if as_json:
        print(json.dumps({"output": str(output_file), "outputs": shapes, "seconds": seconds}, indent=2))
    else:
        listed = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        print(f"{output_file}: {listed} ({1e3 * seconds:.1f} ms)")


@app.command()
@_reported
def info(path: Annotated[Path, typer.Argument(help="A bundle or a checkpoint.")], as_json: Json = False) -> None:
    """What a bundle or a checkpoint holds."""
    from pom_edge.console import print_info
    from pom_edge.inspection import describe

    facts = describe(path)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_info(facts)


@app.command()
@_reported
def doctor(as_json: Json = False) -> None:
    """Which runtimes and compilers this machine has, and what is missing for which target."""
    from pom_edge.console import print_doctor
    from pom_edge.inspection import diagnose

    facts = diagnose()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_doctor(facts)


def main() -> None:
    """Entry point of ``pom-edge``."""
    app(prog_name="pom-edge")


def export_main() -> None:
    """Entry point of ``pom-export``, which is ``pom-edge export``."""
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(export_command)
    single(prog_name="pom-export")


if __name__ == "__main__":
    main()

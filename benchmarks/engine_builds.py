"""Time and peak memory of TensorRT-RTX builds of a bundle: python -m benchmarks.engine_builds BUNDLE.pom ...

Works on a copy. Needs tensorrt_rtx, and neither GPU nor driver: what is built is not run here. CPU seconds are those of the
building process, its start included; unlike the other ones they mean something on a machine that does other work as well.
"""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

from benchmarks.lockstep import arguments_of
from pom_edge.bundle import Bundle
from pom_edge.compiling import EngineOptions, compile_bundle

SIZES = {"static": {}, "dynamic": {"batch": "1:1:8", "tokens": "1:64:512"}}


def main(paths: list[str]) -> None:
    print("| bundle | form | precision | shapes | layers | engine | seconds | CPU seconds | peak memory |")
    print("|---" * 9 + "|", flush=True)
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(shutil.copytree(path, Path(scratch) / path.name))
            graphs = [each for each in Bundle.open(copy).manifest.artifacts if each.target == "onnx"]
            free = {
                dim
                for each in graphs
                if each.stream is None
                for spec in each.inputs
                for dim in spec.shape
                if isinstance(dim, str)
            }
            for kind, sizes in SIZES.items():
                asked = {axis: text for axis, text in sizes.items() if axis in free}
                if kind == "dynamic" and not asked:
                    continue
                for precision in dict.fromkeys(each.precision for each in graphs):
                    options = EngineOptions((precision,), tokens=asked.get("tokens"), batch=asked.get("batch"), overwrite=True)
                    row(path.stem, copy, kind, options)


def row(name: str, bundle: Path, kind: str, options: EngineOptions) -> None:
    """Build and print."""
    before = cpu_seconds()
    (made,) = compile_bundle(bundle, ["rtx"], options, lambda _: None).artifacts
    engine, taken = made.engine or {}, cpu_seconds() - before
    mib = sum((bundle / file).stat().st_size for file in made.files) / 2**20
    print(
        f"| {name} | {made.form} | {made.precision} | {kind} | {sum(engine['layers'])} | {mib:.1f} MiB | "
        f"{sum(engine['seconds']):.1f} | {taken:.1f} | {max(engine['peak_bytes']) / 2**20:.0f} MiB |",
        flush=True,
    )


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = arguments_of(__doc__)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE.pom")
    main(parser.parse_args().bundles)

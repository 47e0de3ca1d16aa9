"""Time and peak memory of TensorRT-RTX builds of a bundle: python -m benchmarks.engine_builds BUNDLE.pom ...

Works on a copy. Needs tensorrt_rtx, and neither GPU nor driver: what is built is not run here.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from pom_edge.bundle import Bundle
from pom_edge.compiling import EngineOptions, compile_bundle

SIZES = {"static": {}, "dynamic": {"batch": "1:1:8", "tokens": "1:64:512"}}


def main(paths: list[str]) -> None:
    print("| bundle | form | precision | shapes | layers | engine | seconds | peak memory |\n|---|---|---|---|---|---|---|---|")
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
                precisions = tuple(dict.fromkeys(each.precision for each in graphs))
                options = EngineOptions(precisions, tokens=asked.get("tokens"), batch=asked.get("batch"), overwrite=True)
                for made in compile_bundle(copy, ["rtx"], options, lambda _: None).artifacts:
                    engine = made.engine or {}
                    size = sum((copy / file).stat().st_size for file in made.files)
                    print(
                        f"| {path.stem} | {made.form} | {made.precision} | {kind} | {sum(engine['layers'])} | "
                        f"{size / 2**20:.1f} MiB | {sum(engine['seconds']):.1f} | "
                        f"{max(engine['peak_bytes']) / 2**20:.0f} MiB |",
                        flush=True,
                    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_builds", description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE.pom")
    main(parser.parse_args().bundles)

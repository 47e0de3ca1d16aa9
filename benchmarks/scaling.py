"""How time grows with the number of tokens, for every form, and that a decode step does not grow at all.

    python -m benchmarks.scaling [--tokens 1024 .. 32768] [--last 1000000] [--plot FILE.svg] [--json FILE]

One mixer (d 384, degree 3, expand 2, 6 heads, FP32, 2 threads), ONNX Runtime: parallel (full context), causal (all tokens
at once), recurrent (a stream in chunks of 1,024), streamed (full context in passes of 1,024). The exponent is the slope of log
time over log N by least squares: 1 is linear, 2 what attention costs in the end. Decode: single steps at ever later positions,
and the private memory of the process there. --elsewhere: the parallel and the causal form also by PyTorch itself and, where
they are installed (make peers), by OpenVINO from the same ONNX file and by ExecuTorch (XNNPACK) from the module, lowered for
each length; streams are driven by our own sessions, here ONNX Runtime's. --plot needs matplotlib.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lockstep import Model, add_threads, arguments_of, check, described, measure, positive, writable, write_json
from benchmarks.peers import save_executorch
from benchmarks.published_vs_lowered import DEGREE, DIM, EXPAND, HEADS
from pom_edge import PoM, export_bundle
from pom_edge.export.forms import LayerModel
from pom_edge.runtimes import open_session
from pom_edge.runtimes.session import Session
from pom_edge.runtimes.timing import timed

CHUNK = 1024
FIRST_STEP = 1000
FORMS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "causal": {"mask": "causal"},
    "recurrent": {"form": "recurrent", "mask": "causal"},
    "streamed": {"form": "streamed", "chunk": CHUNK},
}


def layer() -> PoM:
    """The mixer."""
    torch.manual_seed(0)
    made = PoM(DIM, DEGREE, EXPAND, n_sel_heads=HEADS).eval()
    torch.nn.init.normal_(made.po_coeff, std=0.3)
    return made


def exponent(points: list[tuple[int, float]]) -> float:
    """Slope of log seconds over log tokens."""
    tokens, seconds = np.log(np.array(points, dtype=np.float64)).T
    return float(np.polyfit(tokens, seconds, 1)[0])


def run_of(form: str, session: Session, x: np.ndarray) -> Callable[[], None]:
    """One whole sequence."""
    if form != "recurrent":
        return lambda: (session.run(x), None)[1]

    def stream() -> None:
        session.reset()
        for _ in session.stream(np.split(x, range(CHUNK, x.shape[1], CHUNK), axis=1)):
            pass

    return stream


def sequences(sessions: dict[str, Session], lengths: list[int], rounds: int) -> dict[str, list[tuple[int, float]]]:
    """(tokens, median seconds) of each form, interleaved."""
    points: dict[str, list[tuple[int, float]]] = {form: [] for form in sessions}
    for tokens in lengths:
        x = np.random.default_rng(0).standard_normal((1, tokens, DIM)).astype(np.float32)
        runs = {form: run_of(form, session, x) for form, session in sessions.items()}
        seconds: dict[str, list[float]] = {form: [] for form in runs}
        for _ in range(rounds + 1):
            for form, run in runs.items():
                seconds[form].append(timed(run))
        for form, taken in seconds.items():
            points[form].append((tokens, statistics.median(taken[1:])))
    return points


def elsewhere(folder: Path, lengths: list[int], threads: int, rounds: int) -> dict[str, list[tuple[int, float]]]:
    """The same for runtimes that have no session of ours, each in a process of its own; held against the ONNX file first."""
    points: dict[str, list[tuple[int, float]]] = {}
    for tokens in sorted(set(lengths)):
        made: dict[str, Model] = {}
        for form in ("parallel", "causal"):
            alike = models(form, tokens, folder)
            if not points:
                check(alike, tokens, DIM, threads, folder)
            made |= {f"{form}, {runtime}": model for runtime, model in alike.items() if runtime != "ONNX Runtime"}
        for what, taken in measure(made, tokens, DIM, threads, rounds).items():
            points.setdefault(what, []).append((tokens, taken.ms / 1e3))
    return points


def models(form: str, tokens: int, folder: Path) -> dict[str, Model]:
    """One form in every runtime that is installed; the ONNX file is there."""
    onnx, module, program = folder / f"{form}.pom" / "parallel.fp32.onnx", folder / f"{form}.pickle", folder / f"{form}.pte"
    mixer = LayerModel(layer(), "causal" if form == "causal" else "none")
    torch.save(mixer, module)
    made = {"ONNX Runtime": Model("ort", onnx), "PyTorch": Model("eager", module)}
    if find_spec("openvino") is not None:
        made["OpenVINO"] = Model("openvino", onnx)
    if find_spec("executorch") is not None:
        save_executorch(mixer, tokens, program)
        made["ExecuTorch"] = Model("executorch", program)
    return made


def decode(session: Session, last: int, repeats: int = 300) -> list[tuple[int, float, int]]:
    """(position, median seconds of a step, private bytes) at 1,000, 10,000 .. ``last`` tokens."""
    rng = np.random.default_rng(0)
    chunk, token = (rng.standard_normal((1, size, DIM)).astype(np.float32) for size in (FIRST_STEP, 1))
    session.reset()
    seen, found, wanted = 0, [], FIRST_STEP
    while wanted <= last:
        while seen < wanted:
            session.step(chunk)
            seen += chunk.shape[1]
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            session.step(token)
            taken.append(time.perf_counter() - start)
        seen += repeats
        found.append((wanted, statistics.median(taken), private_bytes()))
        wanted *= 10
    return found


def private_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def plot(points: dict[str, list[tuple[int, float]]], steps: list[tuple[int, float, int]], file: Path) -> None:
    """Both in one picture."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for form, found in points.items():
        left.plot(*zip(*((n, 1e3 * s) for n, s in found), strict=True), "o-", label=f"{form}: N^{exponent(found):.2f}")
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="A whole sequence")
    left.legend()
    right.plot(*zip(*((n, 1e3 * s) for n, s, _ in steps), strict=True), "o-")
    right.set(xscale="log", xlabel="tokens seen", ylabel="ms", title="A decode step", ylim=(0, None))
    figure.savefig(file)


def main() -> None:
    """Print the tables."""
    parser = arguments_of(__doc__)
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768], help="lengths of the sequence"
    )
    parser.add_argument("--last", type=positive, default=1_000_000, help="last position of a decode step: 1,000, 10,000 ..")
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=5, help="timed, after one that is not")
    parser.add_argument("--elsewhere", action="store_true", help="also by PyTorch, OpenVINO and ExecuTorch")
    parser.add_argument("--plot", type=writable, help="draw both there, as SVG")
    parser.add_argument("--json", type=writable, help="also write the rows there")
    options = parser.parse_args()
    if len(set(options.tokens)) < 2:
        parser.error("--tokens needs two lengths or more: an exponent is a slope")
    if options.last < FIRST_STEP:
        parser.error(f"--last is {options.last}; the first step that is timed follows {FIRST_STEP:,} tokens")
    print(f"{described(options.threads)}, one mixer, d {DIM}, FP32; medians of {options.rounds} interleaved rounds")
    with tempfile.TemporaryDirectory() as folder:
        sessions: dict[str, Session] = {}
        for form, settings in FORMS.items():
            export_bundle(layer(), out=Path(folder) / f"{form}.pom", **settings)
            sessions[form] = open_session(Path(folder) / f"{form}.pom", threads=options.threads)
        points = sequences(sessions, options.tokens, options.rounds)
        steps = decode(sessions["recurrent"], options.last)
        if options.elsewhere:
            points |= elsewhere(Path(folder), options.tokens, options.threads, options.rounds)
    for form, found in points.items():
        print(f"{form:21} N^{exponent(found):.3f}   " + "  ".join(f"{n}: {1e3 * s:.1f} ms" for n, s in found))
    for position, seconds, memory in steps:
        print(f"decode at {position:>9,}: {1e3 * seconds:.4f} ms, {memory / 2**20:.1f} MiB private")
    made = [{"what": form, "tokens": n, "ms": 1e3 * s, "exponent": exponent(p)} for form, p in points.items() for n, s in p]
    made += [{"what": "decode", "tokens": n, "ms": 1e3 * s, "private_bytes": m} for n, s, m in steps]
    write_json(options.json, options.threads, made)
    if options.plot is not None:
        plot(points, steps, options.plot)


if __name__ == "__main__":
    main()

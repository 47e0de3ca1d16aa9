"""How exact long streams are, and whether a step costs the same at the millionth token.

    python -m benchmarks.streams [--part mixer|steps|decode|encoder] [--tokens N] [--steps 1000000] [--folder DIR]

mixer    one causal mixer (d 16, degree 3, expand 2, 4 heads, 1-D rotary), 100,000 tokens, against the module in float64:
         recurrent for every chunking, streamed for the full context
steps    the same mixer in single steps
decode   decode steps of demos/text/model.pt
encoder  a full-context encoder (d 384, four blocks, 6 heads), 65,536 tokens, streamed, in memory and spilled, against
         PyTorch in float64

All run as ONNX graphs in ONNX Runtime. Without --part all four, one after the other.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from benchmarks.lockstep import arguments_of, positive
from pom_edge import ModelConfig, PoM, build_model, export_bundle, load, open_session
from pom_edge.runtimes.session import Session

DIM = 16
T = TypeVar("T")


PARTS = ("mixer", "steps", "decode", "encoder")


def main() -> None:
    """Print the tables."""
    parser = arguments_of(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="repeatable; default: all")
    parser.add_argument("--tokens", type=positive, help="of mixer (default 100000) and encoder (65536)")
    parser.add_argument("--steps", type=positive, default=1_000_000, help="single tokens")
    parser.add_argument("--chunk", type=positive, default=1024, help="of encoder")
    parser.add_argument("--folder", type=Path, help="for bundles and spilled tokens (default: a temporary one)")
    options = parser.parse_args()
    parts = options.part or PARTS
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, torch.no_grad():
        if "mixer" in parts:
            _accuracy(_mixer(), options.tokens or 100_000, Path(folder))
        if "steps" in parts:
            _single_steps(_mixer(), options.steps, Path(folder))
        if "decode" in parts:
            _decode(Path(folder))
        if "encoder" in parts:
            _encoder(options.tokens or 65_536, options.chunk, Path(folder))


def _mixer() -> PoM:
    torch.manual_seed(0)
    layer = PoM(DIM, degree=3, expand=2, n_sel_heads=4, rotary="1d").eval()
    torch.nn.init.normal_(layer.po_coeff, std=0.3)
    return layer


def _accuracy(layer: PoM, tokens: int, folder: Path) -> None:
    x = torch.randn(1, tokens, DIM)
    double = PoM(DIM, degree=3, expand=2, n_sel_heads=4, rotary="1d").double().eval()
    double.load_state_dict(layer.state_dict())
    causal, full = double(x.double(), causal=True).numpy(), double(x.double()).numpy()
    export_bundle(layer, form="recurrent", mask="causal", out=folder / "recurrent.pom")
    with open_session(folder / "recurrent.pom") as session:
        for name, chunks in _chunkings(x.shape[1]):
            print(f"recurrent, {name}: {_db(causal, _streamed(session, x, chunks)):.1f} dB", flush=True)
    export_bundle(layer, mask="causal", out=folder / "causal.pom")
    with open_session(folder / "causal.pom") as session:
        print(f"parallel, causal: {_db(causal, np.asarray(session.run(x.numpy()))):.1f} dB", flush=True)
    for chunk in (64, 1000, 4096):
        out = folder / f"streamed-{chunk}.pom"
        export_bundle(layer, form="streamed", chunk=chunk, out=out)
        with open_session(out) as session:
            print(f"streamed, chunks of {chunk}: {_db(full, np.asarray(session.run(x.numpy()))):.1f} dB", flush=True)


def _chunkings(tokens: int) -> Iterator[tuple[str, list[int]]]:
    rng = np.random.default_rng(0)
    for size in (1, 7, 64):
        yield f"chunks of {size}", [size] * (tokens // size) + ([tokens % size] if tokens % size else [])
    for seed in range(2):
        cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, tokens), 200, replace=False))
        yield f"random cuts {seed}", np.diff([0, *cuts, tokens]).tolist()
    first = int(rng.integers(1, tokens // 2))
    yield "uneven", [first, 1, tokens - first - 1]


def _streamed(session: Session, x: torch.Tensor, chunks: list[int]) -> np.ndarray:
    session.reset()
    pieces = np.split(x.numpy(), np.cumsum(chunks)[:-1], axis=1)
    return np.concatenate([np.asarray(y) for y in session.stream(pieces)], axis=1)


def _single_steps(layer: PoM, steps: int, folder: Path) -> None:
    """The state after single steps, and the last 1,000 answers, against a float64 mean over everything."""
    bundle = folder / "steps.pom"
    export_bundle(layer, form="recurrent", mask="causal", out=bundle)
    rng = np.random.default_rng(1)
    double = PoM(DIM, degree=3, expand=2, n_sel_heads=4, rotary="1d").double().eval()
    double.load_state_dict(layer.state_dict())
    total = torch.zeros(1, 1, double.hidden, dtype=torch.float64)
    kept: list[np.ndarray] = []
    with open_session(bundle) as session:
        start = time.perf_counter()
        for first in range(0, steps, 10_000):
            x = rng.standard_normal((1, min(10_000, steps - first), DIM)).astype(np.float32)
            answers = [np.asarray(session.step(x[:, i : i + 1])) for i in range(x.shape[1])]
            positions = torch.arange(first, first + x.shape[1]).unsqueeze(-1)
            features = double.features(torch.from_numpy(x).double(), positions)
            if first + x.shape[1] == steps:
                seen = torch.arange(first + 1, steps + 1).double().view(1, -1, 1)
                h = (total + features.cumsum(1)) / seen
                expected = double.readout(double.selection(torch.from_numpy(x).double(), positions), h)
                kept = [expected[:, -1000:].numpy(), np.concatenate(answers[-1000:], 1)]
            total += features.sum(1, keepdim=True)
        rate = steps / (time.perf_counter() - start)
    print(f"{steps:,} single steps, the last 1,000 answers: {_db(*kept):.1f} dB ({rate:,.0f} steps a second)", flush=True)


def _decode(folder: Path) -> None:
    """Median time of a decode step at token 1,000 and at token 1,000,000, and the memory between."""
    export_bundle(load("demos/text/model.pt"), form="recurrent", out=folder / "text.pom")
    token = np.array([[101]])
    with open_session(folder / "text.pom") as session:
        session.step(np.full((1, 1000), 101))
        early, memory = _median(session, token), _rss()
        for _ in range(250):
            session.step(np.full((1, 4000), 101))
        grown = _rss()
        late = _median(session, token)
        after = _rss()
    print(f"decode step: {early * 1e3:.3f} ms at token 1,000, {late * 1e3:.3f} ms at token 1,000,000 ({late / early:.3f}x)")
    sizes = (f"{size / 2**20:.1f} MiB" for size in (memory, grown, after))
    print("memory: {} at token 1,000, {} after prefill in chunks of 4,000, {} after the last step".format(*sizes))


def _encoder(tokens: int, chunk: int, folder: Path) -> None:
    """Streamed, in memory and from file to file, against the model in float64 over the whole sequence."""
    torch.manual_seed(0)
    model = build_model(ModelConfig("encoder", dim=384, depth=4, input_dim=64, n_sel_heads=6)).eval()
    for block in model.blocks:  # type: ignore[union-attr]
        torch.nn.init.normal_(block.mixer.po_coeff, std=0.3)
    x = torch.randn(1, tokens, 64)
    np.save(folder / "x.npy", x.numpy())
    bundle = folder / "encoder.pom"
    export_bundle(model, form="streamed", chunk=chunk, example_inputs={"x": x[:, :24]}, out=bundle)
    with open_session(bundle) as session:
        found, seconds = _timed(lambda: np.asarray(session.run(x.numpy())))
    print(f"encoder, {tokens:,} tokens in chunks of {chunk}: {tokens / seconds:,.0f} tokens a second", flush=True)
    with open_session(bundle, spill=folder) as session:
        _, seconds = _timed(lambda: session.run_file(folder / "x.npy", folder / "y.npy"))
    spilled = np.load(folder / "y.npy", mmap_mode="r")
    same = all(np.array_equal(found[:, i : i + 4096], spilled[:, i : i + 4096]) for i in range(0, tokens, 4096))
    how = "equal bit for bit" if same else "NOT equal"
    print(f"encoder, spilled: {how} to the run in memory, {tokens / seconds:,.0f} tokens a second", flush=True)
    expected, seconds = _timed(lambda: _in_float64(model, x))
    print(f"encoder against PyTorch in float64 ({seconds:,.0f} s): {_db(expected, found):.1f} dB", flush=True)


def _in_float64(model: torch.nn.Module, x: torch.Tensor, piece: int = 2048) -> np.ndarray:
    """The model's blocks by the definition, layer by layer over all tokens; pieces only bound the memory of one operation.

    h = (1/N) sum_n f(norm1(x_n));   x <- x + readout(gate(norm1(x)), h);   x <- x + ff(norm2(x))
    """
    double = copy.deepcopy(model).double()
    tokens = x.shape[1]
    y = double.embed(x.double())  # type: ignore[operator]
    for block in double.blocks:  # type: ignore[union-attr]
        parts = [block.norm1(part) for part in y.split(piece, 1)]
        mixer: PoM = block.mixer
        h = torch.stack([mixer.features(part, None).sum(1) for part in parts]).sum(0).unsqueeze(1) / tokens  # (1, 1, D)
        y = y + torch.cat([mixer.readout(mixer.selection(part, None), h) for part in parts], 1)
        y = torch.cat([part + block.ff(block.norm2(part)) for part in y.split(piece, 1)], 1)
    return double.norm(y).numpy()  # type: ignore[no-any-return,operator]


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def _median(session: Session, token: np.ndarray, repeats: int = 500) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        session.step(token)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _rss() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _db(expected: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(expected).sum() / np.square(found.astype(np.float64) - expected).sum()))


if __name__ == "__main__":
    main()

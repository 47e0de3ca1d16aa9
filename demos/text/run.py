"""Generate text from the recurrent graph, without torch: prefill and decode are the same graph, and memory stays as it is.

Run as:

    pom-export demos/text/model.pt --form recurrent --out text.pom
    python demos/text/run.py text.pom --prompt "The whale" --tokens 400
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

if __package__ in (None, ""):  # run as a file: let it find its folder's siblings
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos.command import exit_code
from pom_edge.errors import InputError
from pom_edge.runtimes import Session, open_session

__all__ = ["generate", "main", "sample"]


def sample(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """One id from logits (vocabulary,); temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return int(np.searchsorted(np.cumsum(weights), rng.random() * weights.sum()))


def generate(session: Session, prompt: bytes, tokens: int, temperature: float = 0.7, seed: int = 0) -> list[int]:
    """Ids that follow the prompt: it goes in as one chunk, then every id as a chunk of one."""
    rng, made = np.random.default_rng(seed), []
    session.reset()
    logits = np.asarray(session.step(np.frombuffer(prompt, np.uint8).astype(np.int64)[None]))
    for _ in range(tokens):
        made.append(sample(logits[0, -1], temperature, rng))
        logits = np.asarray(session.step(np.array([[made[-1]]])))
    return made


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path, help="made by pom-export --form recurrent")
    parser.add_argument("--prompt", default="The whale ", help="plain ASCII")
    parser.add_argument("--tokens", type=int, default=400, help="bytes to generate")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 takes the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", help="which runtime runs the bundle (default: its artifact's)")
    options = parser.parse_args(argv)
    return exit_code(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    if not options.prompt or not options.prompt.isascii():
        raise InputError(f"--prompt is {options.prompt!r}; the model knows ASCII only, and needs at least one character")
    if options.tokens < 1 or not options.temperature >= 0:
        raise InputError("expected --tokens of at least 1 and a --temperature of at least 0")
    with open_session(options.bundle, runtime=options.runtime) as session:
        generate(session, options.prompt.encode(), min(options.tokens, 20), options.temperature)  # warm
        before, start = _memory(), time.perf_counter()
        ids = generate(session, options.prompt.encode(), options.tokens, options.temperature, options.seed)
        seconds, seen = time.perf_counter() - start, session.tokens_seen[0]
    print(options.prompt + bytes(ids).decode("ascii", "replace"))
    grown = "" if before is None else f"; memory grew by {max((_memory() or 0) - before, 0) / 2**20:.1f} MiB over {seen} tokens"
    print(f"\n{options.tokens / seconds:,.0f} bytes a second, one by one{grown}")
    print(f"torch imported: {'yes' if 'torch' in sys.modules else 'no'}")


def _memory() -> int | None:
    """Private memory of this process in bytes, where the system tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


if __name__ == "__main__":
    sys.exit(main())

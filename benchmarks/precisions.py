"""FP32, FP16, INT8 and integer weights side by side.

    python -m benchmarks.precisions [--model mixer|encoder] [--tokens 1024 4096]

One mixer or a 4-block encoder (d 384, degree 3, expand 2, 6 heads) with random weights, in ONNX Runtime, every layer in
the precision named that keeps its gate: ``pom-edge bench`` on a bundle of all of them. INT8 is calibrated on noise.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.lockstep import add_threads, arguments_of, described, positive, writable, write_json
from benchmarks.mixer_speed import mixers
from benchmarks.peers import encoders
from benchmarks.published_vs_lowered import DIM
from pom_edge import PomError, export_bundle
from pom_edge.runtimes.bench import bench


def main() -> None:
    """Print one table."""
    parser = arguments_of(__doc__)
    parser.add_argument("--model", choices=("mixer", "encoder"), default="mixer", help="which")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 4096], help="lengths of the sequence")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["fp32", "fp16", "int8", "w8", "w4"],
        default=["fp32", "fp16", "int8", "w8"],
        help="precisions",
    )
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=9, help="timed, after one that is not")
    parser.add_argument("--bundle", type=Path, help="kept there, and taken from there if it exists")
    parser.add_argument("--json", type=writable, help="also write the rows there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.bundle or Path(folder) / "model.pom"
        if not out.exists():
            model = (mixers() if options.model == "mixer" else encoders())[0]
            calibration = [{"x": torch.randn(4, 64, DIM)} for _ in range(8)]
            example = {"x": torch.randn(2, 64, DIM)}
            export_bundle(model, precision=options.precision, calibration=calibration, example_inputs=example, out=out)
        try:
            report = bench(out, options.tokens, threads=options.threads, rounds=options.rounds)
        except PomError as error:
            parser.error(str(error))
    print(f"{described(options.threads)}, {options.model}; {report.gflops} GFLOP/s in GEMM")
    print(f"{'N':>6} {'precision':10} {'median ms':>10} {'p90':>8} {'FP32 / this':>12} {'SNR dB':>7} {'peak MiB':>9}")
    for row in report.rows:
        ratio = "" if row.against_fp32 is None else f"{row.against_fp32:.2f}"
        peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}"
        snr = "" if row.snr_db is None else f"{row.snr_db:.1f}"
        print(f"{row.tokens:6} {row.precision:10} {row.median_ms:10.2f} {row.p90_ms:8.2f} {ratio:>12} {snr:>7} {peak:>9}")
    made = [{"what": row.precision, "tokens": row.tokens, "ms": row.median_ms, "p90_ms": row.p90_ms} for row in report.rows]
    write_json(options.json, options.threads, made)


if __name__ == "__main__":
    main()

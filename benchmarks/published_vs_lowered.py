"""Node counts, peak memory and time of the published form's export against ours, same runtime, one run.

    python -m benchmarks.published_vs_lowered [--tokens 4096] [--threads 2]

Each graph runs in a fresh process; memory is the growth of the process's peak over what it held with the session open.
Times are medians of 9 runs inside those processes, so compare them as ratios only.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from benchmarks.lockstep import add_threads, arguments_of, positive
from benchmarks.published_form import PublishedForm
from pom_edge.export.forms import LayerModel
from pom_edge.export.inputs import Extent, make_inputs, plan_axes
from pom_edge.export.lowering import lower
from pom_edge.export.moments import with_moments
from pom_edge.export.onnx_graph import export_graph, save_graph
from pom_edge.mixer import PoM

DIM, DEGREE, EXPAND, HEADS = 384, 3, 2, 6

CHILD = """
import json, statistics, sys, time
import numpy as np
from pom_edge.runtimes.onnxruntime_session import native_session
path, tokens, dim, threads = sys.argv[1], *map(int, sys.argv[2:5])
session = native_session(path, threads)
x = np.random.default_rng(0).standard_normal((1, tokens, dim)).astype(np.float32)
def memory(field):  # not ru_maxrss: that one starts at the parent's peak
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024
held = memory("VmRSS")
session.run(None, {"x": x})
peak = memory("VmHWM")
times = []
for _ in range(9):
    start = time.perf_counter(); session.run(None, {"x": x}); times.append(time.perf_counter() - start)
print(json.dumps({"peak_mib": (peak - held) / 2**20, "ms": 1e3 * statistics.median(times)}))
"""


def export(model: nn.Module, mixers: list[str], path: Path, ours: bool = False) -> int:
    """Write the graph of a model with free batch and tokens, as pom-export does if ``ours``; returns its node count."""
    example = {"x": torch.randn(2, 40, DIM)}
    axes = plan_axes(example, Extent(), Extent())
    graph = export_graph(model, mixers, make_inputs(example, axes, {"batch": 2, "tokens": 40}, 0), axes)
    graph = with_moments(graph) if ours else graph
    save_graph(graph.model, path, {})
    return len(graph.model.graph)


def main() -> None:
    """Print one table."""
    parser = arguments_of(__doc__)
    parser.add_argument("--tokens", type=positive, default=4096, help="length of the sequence")
    add_threads(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{platform.processor() or platform.machine()}, {arguments.threads} threads, N = {arguments.tokens}, d = {DIM}, "
        f"k = {DEGREE}, expand = {EXPAND}, {HEADS} heads, FP32, torch {torch.__version__}"
    )
    print(f"{'mixer':10} {'form':10} {'nodes':>6} {'peak MiB':>9} {'ms':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for causal in (False, True):
            mixer = PoM(DIM, DEGREE, EXPAND, n_sel_heads=HEADS).eval()
            nn.init.normal_(mixer.po_coeff)
            layer = LayerModel(mixer, "causal" if causal else "none")
            published = PublishedForm(mixer, causal).eval()
            x = torch.randn(2, 50, DIM)
            with torch.no_grad():
                torch.testing.assert_close(published(x), layer(x), rtol=1e-4, atol=1e-4)  # the yardstick is the same function
            lowered, names = lower(layer)
            for form, model, mixers in (("published", published, []), ("lowered", lowered, names)):
                path = Path(folder) / f"{form}.onnx"
                nodes = export(model, mixers, path, form == "lowered")
                sizes = [str(path), str(arguments.tokens), str(DIM), str(arguments.threads)]
                child = subprocess.run([sys.executable, "-c", CHILD, *sizes], capture_output=True, text=True, check=True)
                found = json.loads(child.stdout)
                kind = "causal" if causal else "full"
                print(f"{kind:10} {form:10} {nodes:6} {found['peak_mib']:9.0f} {found['ms']:8.1f}", flush=True)


if __name__ == "__main__":
    main()

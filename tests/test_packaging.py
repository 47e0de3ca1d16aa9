"""What a user installs: the wheel's files, a checkout without symbolic links, and a device that has the core alone.

Nothing is downloaded: pip builds with the setuptools that is here, and the core's dependencies are linked from this
environment.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "pom_edge": "pom_edge",
    "export": "pom_edge/export",
    "quantize": "pom_edge/quantize",
    "runtimes": "pom_edge/runtimes",
}
HEAVY = ("torch", "onnx", "onnxruntime", "onnxscript", "transformers")
LINKS = ("export", "quantize", "runtimes")
DATA = ("py.typed", "page.css")


def _sources() -> set[str]:
    """Where every module of the source tree belongs inside the wheel."""
    return {
        f"{installed}/{file.name}"
        for folder, installed in {**FOLDERS, "pom_edge/report": "pom_edge/report"}.items()
        for file in (ROOT / folder).iterdir()
        if file.suffix == ".py" or file.name in DATA
    }


def _checkout(folder: Path, links: str) -> Path:
    """A copy of what is packaged, with its links as they are, as text files (Windows), or without them (zip)."""
    folder.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    (folder / "README.md").touch()
    for name in LINKS if links != "links" else ():
        link = folder / "pom_edge" / name
        if link.is_symlink():
            link.unlink()
        else:
            shutil.rmtree(link, ignore_errors=True)  # this very checkout came without links
        if links == "text":
            link.write_text(f"../{name}")
    return folder


def _run(*command: str | Path, path: Path | None = None, cwd: Path | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        env=env | ({"PYTHONPATH": str(path)} if path else {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _dependencies(*roots: str) -> set[str]:
    """Names of installed distributions that these need, extras left out."""
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for line in distribution(name).requires or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(need.name)
    return found


def _core() -> set[str]:
    """The declared dependencies of pom-edge, with theirs."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("\ndependencies = [", 1)[1].split("]", 1)[0]
    return _dependencies(*(Requirement(line.strip(' ",')).name for line in block.splitlines() if line.strip()))


def _link_distributions(names: set[str], folder: Path) -> None:
    """Make exactly these distributions importable from ``folder``."""
    folder.mkdir()
    for name in names:
        dist = distribution(name)
        tops = {file.parts[0] for file in dist.files or [] if file.parts[0] not in ("..", "__pycache__", "bin")}
        for top in tops:
            source, target = Path(str(dist.locate_file(top))), folder / top
            if not target.exists():
                target.symlink_to(source)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return _build_wheel(_checkout(folder / "tree", "links"), folder / "dist")


def _build_wheel(tree: Path, out: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    _run(*pip, "--wheel-dir", out, tree)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pom-edge and its core dependencies, and nothing else; returns its interpreter."""
    return _environment(tmp_path_factory.mktemp("device"), _core(), wheel)


def _environment(folder: Path, names: set[str], *install: str | Path) -> Path:
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    _link_distributions(names, folder / "site")
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "site.pth").write_text(str(folder / "site"))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    _run(*pip, "--no-build-isolation", *install)
    return python


def _modules_after(python: Path, code: str, cwd: Path) -> set[str]:
    """Names of top-level modules that a fresh interpreter holds after running ``code``."""
    ending = "import sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    return set(json.loads(_run(python, "-c", f"{code}\n{ending}", cwd=cwd).splitlines()[-1]))


def test_importing_pulls_nothing_heavy(tmp_path: Path) -> None:
    """Even where everything is installed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport pom_edge, pom_edge.runtimes, pom_edge.cli"
    assert not _modules_after(Path(sys.executable), code, tmp_path) & set(HEAVY)


def test_the_bare_names_are_not_imported() -> None:
    """`import runtimes` beside `import pom_edge.runtimes` makes two classes of each: nothing here does."""
    assert not set(sys.modules) & {"export", "quantize", "runtimes"}


PUBLIC = {
    "pom_edge": [
        "__version__",
        "ModelConfig",
        "PoM",
        "PoMState",
        "PolynomialMixer",
        "PomError",
        "build_model",
        "coefficient_penalty",
        "export_bundle",
        "load",
        "open_session",
        "replace_attention",
        "save_checkpoint",
    ],
    "pom_edge.export": ["TorchSession", "export_graph", "lint", "lower", "save_graph"],
    "pom_edge.runtimes": ["CheckReport", "Session", "check_bundle", "open_session"],
    "pom_edge.quantize": [
        "Calibration",
        "Options",
        "Prepared",
        "Quantized",
        "StoredWeight",
        "Training",
        "finish",
        "load_calibration",
        "prepare",
        "prepare_qat",
        "weight_only",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_pinned_and_there(package: str) -> None:
    module: Any = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    for name in module.__all__:
        assert getattr(module, name) is not None, name


def test_the_lock_pins_everything_exactly() -> None:
    lines = (ROOT / "requirements-dev.lock").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(need.specifier) == 1 and str(need.specifier).startswith("==") for need in pinned)
    names = {need.name.lower().replace("_", "-") for need in pinned}
    assert {"torch", "onnx", "onnxruntime", "setuptools"} <= names
    missing = {name.lower().replace("_", "-") for name in _core()} - names
    assert not missing, f"needed at run time, but not pinned: {missing}"


def test_ci_runs_what_a_contributor_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "exec make test" in script.read_text()


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        entry_points = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert names == _sources()
    assert "pom-export = pom_edge.entry:export_main" in entry_points
    assert "pom-edge = pom_edge.entry:main" in entry_points
    assert licences


@pytest.mark.slow
def test_a_wheel_from_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    tree = _checkout(tmp_path / "tree", "links")
    build = "from setuptools import build_meta as b; print(b.build_sdist('dist'))"
    name = _run(sys.executable, "-c", build, cwd=tree).splitlines()[-1]
    with tarfile.open(tree / "dist" / name) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 know no filter
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = _build_wheel(unpacked, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


@pytest.mark.slow
@pytest.mark.parametrize("links", ["links", "text", "missing"])
@pytest.mark.parametrize("editable", [False, True], ids=["plain", "editable"])
def test_a_checkout_installs_with_and_without_links(links: str, editable: bool, tmp_path: Path) -> None:
    tree = _checkout(tmp_path / "tree", links)
    python = _environment(tmp_path, _core() | {"setuptools"}, *(["--editable"] if editable else []), tree)
    code = "import pom_edge.runtimes as r, importlib.util as u; print(r.__file__); print(u.find_spec('pom_edge.export'))"
    output = _run(python, "-c", code, cwd=tmp_path)
    assert "ModuleSpec(name='pom_edge.export'" in output
    assert (str(tree) in output) == editable
    assert _run(python, "-m", "pom_edge.cli", "--help", cwd=tmp_path)


@pytest.mark.slow
def test_the_core_alone_imports_and_helps(device: Path, tmp_path: Path) -> None:
    for module in HEAVY:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is not None)"
        _run(device, "-c", code, cwd=tmp_path)
    _run(device, "-c", "import pom_edge, pom_edge.runtimes, pom_edge.bundle, pom_edge.runtimes.memory", cwd=tmp_path)
    assert "--target" in _run(device.parent / "pom-export", "--help", cwd=tmp_path)
    commands = _run(device.parent / "pom-edge", "--help", cwd=tmp_path)
    assert all(name in commands for name in ("export", "check", "run", "info", "doctor"))


@pytest.mark.slow
def test_the_core_alone_says_what_to_install(device: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.pt"
    model.write_bytes(b"")
    done = subprocess.run([device.parent / "pom-export", str(model)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'pom-edge[export]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_core_and_one_runtime_check_a_bundle(wheel: Path, tmp_path: Path) -> None:
    """What a device needs: no torch, no onnx."""
    from tests.bundles import make_bundle

    make_bundle(tmp_path / "tiny.pom")
    python = _environment(tmp_path, _core() | _dependencies("onnxruntime", "matplotlib"), wheel)
    _run(python.parent / "pom-edge", "report", "tiny.pom", "--rounds", "1", cwd=tmp_path)
    assert "1 was not compared" in (tmp_path / "tiny.html").read_text()
    report = json.loads(_run(python.parent / "pom-edge", "check", "tiny.pom", "--json", cwd=tmp_path))
    assert report["passed"] and report["artifacts"][0]["outputs"]["y"]["snr_db"] >= 90


@pytest.mark.slow
def test_a_device_compiles_a_bundle_in_place(wheel: Path, tmp_path: Path) -> None:
    """The core and TensorRT-RTX, neither torch nor onnx: the engine joins the bundle, which verifies as a whole."""
    from tests.engines import small_bundle

    pytest.importorskip("tensorrt_rtx", reason="has wheels for x86-64 Linux and Windows")
    bundle = small_bundle(tmp_path)
    python = _environment(tmp_path, _core() | _dependencies("tensorrt_rtx_cu13"), wheel)
    report = json.loads(_run(python.parent / "pom-export", bundle.name, "--target", "rtx", "--json", cwd=tmp_path))
    (engine,) = report["artifacts"]
    assert (engine["target"], engine["precision"], engine["verified"]) == ("rtx", "fp16", "built, not run")
    facts = json.loads(_run(python.parent / "pom-edge", "info", bundle.name, "--json", cwd=tmp_path))
    assert [artifact["target"] for artifact in facts["artifacts"]] == ["onnx", "onnx", "onnx", "rtx"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(f".{bundle.name}")], "nothing is left beside it"


BOARDS = {"JetPack 6": ("3.10", "12", 35), "JetPack 7": ("3.12", "13", 39)}  # Python, CUDA, glibc's minor version


@pytest.mark.slow
@pytest.mark.parametrize("board", BOARDS)
def test_a_jetson_needs_no_compiler(board: str, tmp_path: Path) -> None:
    """Core and jetson extra resolve to wheels alone on aarch64. Skipped where there is no package index to ask."""
    python, cuda, glibc = BOARDS[board]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    asked = subprocess.run(
        [*pip, "download", "--no-deps", "-d", tmp_path, "mdurl==999"], capture_output=True, text=True, check=False
    )
    if "from versions: 0" not in asked.stderr:  # an index would have listed what there is
        pytest.skip("no package index can be reached")
    text = (ROOT / "pyproject.toml").read_text()
    lines = text.split("\ndependencies = [", 1)[1].split("]", 1)[0].splitlines()
    needs = [line.strip(' ",') for line in lines if line.strip()]
    jetson = [Requirement(each) for each in re.findall(r'"([^"]+)"', text.split("\njetson = ", 1)[1].splitlines()[0])]
    environment = {"python_version": python}
    chosen = [need for need in jetson if need.marker is None or need.marker.evaluate(environment)]
    assert len(chosen) == 1
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(17, glibc + 1)] + ["manylinux2014_aarch64"]
    flags = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    flags += [part for platform in platforms for part in ("--platform", platform)]
    done = subprocess.run(
        [*pip, "install", *flags, "--target", tmp_path / "site", *needs, f"{chosen[0].name}{chosen[0].specifier}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"cuda-python-{cuda}." in done.stdout and "pydantic_core-" in done.stdout

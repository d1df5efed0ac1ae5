"""Which kinds of sandboxes this machine can run now. Each is tried for real, by the code that a run would ask."""

from functools import partial
from pathlib import Path

from headrace.actors.sandboxes.cgroups import NEEDED, find_controllers
from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.probes import Probe
from headrace.deploy.doctor.report import Check, Status

GROUP = "sandboxes"
KINDS = {
    "docker": "a container for each box",
    "bubblewrap": "namespaces, seccomp and an overlay for each box; the default",
    "landlock": "Landlock and seccomp rules for each box, on the files of this machine",
    "unsafe-process": "always there, and no protection",
}
"""What each kind is, from the strongest to none."""
_GROUPS_FIX = "let the workers make control groups, or run them as another user than root (docs/sandboxes.md, Limits)"
_FIX = "docs/sandboxes.md says what each kind needs"


def sandbox_probes(host: Host) -> list[Probe]:
    """What is asked about sandboxes."""
    return [Probe(group=GROUP, name=mode, ask=partial(_ask, host, mode)) for mode in KINDS]


def _ask(host: Host, mode: str) -> list[Check]:
    return [sandbox(host, mode)]


def sandbox(host: Host, mode: str) -> Check:
    """Whether boxes of one kind work here, else why not."""
    if reason := host.why_no_sandbox(mode):
        return Check(group=GROUP, name=mode, status=Status.MISSING, detail=reason, fix=_FIX)
    if mode == "bubblewrap" and (missing := [name for name in NEEDED if name not in _controllers(host)]):
        told = f"{KINDS[mode]}; no control group for {', '.join(missing)}: weaker limits, for root the weakest"
        return Check(group=GROUP, name=mode, status=Status.WARN, detail=told, fix=_GROUPS_FIX)
    return Check(group=GROUP, name=mode, status=Status.OK, detail=KINDS[mode])


def _controllers(host: Host) -> frozenset[str]:
    """Those whose groups this process may make."""
    mounts, own = (host.read(Path(f"/proc/self/{name}")) for name in ("mountinfo", "cgroup"))
    return find_controllers(mounts, own).controllers if mounts and own else frozenset()

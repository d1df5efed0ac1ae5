"""`headrace doctor`: what this machine can run, what is missing, and the command that fixes it.

One file per subject holds the probes: machine, servers, engines, sandboxes, packages. `host.py` is all that they touch,
`probes.py` runs them side by side under one deadline. Nothing is changed, and nothing is left running.
"""

from headrace.deploy.doctor.engines import engine_probes
from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.machine import machine_probes
from headrace.deploy.doctor.packages import package_probes
from headrace.deploy.doctor.probes import DEADLINE_S, ask_all
from headrace.deploy.doctor.report import Check, Report, Status
from headrace.deploy.doctor.sandboxes import sandbox_probes
from headrace.deploy.doctor.servers import server_probes

__all__ = ["Check", "Host", "Report", "Status", "run_checks"]


def run_checks(
    runs_dir: str = "runs", redis_url: str = "", host: Host | None = None, deadline_s: float = DEADLINE_S
) -> Report:
    """Ask everything, within `deadline_s`.

    Args:
        runs_dir: where runs would be written.
        redis_url: the server that a run would use, secrets by reference; empty means the embedded one.
        host: the machine; another one in tests.
        deadline_s: for all probes together.
    """
    host = host or Host()
    probes = [
        *machine_probes(host, runs_dir),
        *server_probes(host, redis_url),
        *engine_probes(host),
        *sandbox_probes(host),
        *package_probes(host),
    ]
    return Report(ask_all(probes, deadline_s))

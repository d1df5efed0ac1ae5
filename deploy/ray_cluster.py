"""The Ray that a run uses: one of its own, one that it joins, or the one that this process is in already.

Owns starting, joining and leaving it, and noticing that it is gone. Whether it has room is for `placement.py` to say.
"""

import asyncio
import logging
import os
import socket
from typing import Any

import ray

from headrace.deploy.context import RunContext
from headrace.deploy.placement import cpus_of, plan
from headrace.platform.errors import RunFailed

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_PROBE_DEADLINE_S = 2.0


def start_local_ray(cpus: int) -> None:
    """A Ray of this process's own with `cpus` logical CPUs, whatever other Ray there is on this machine;
    `keep_ray_local` must have been called before."""
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        _node_ip_address="127.0.0.1",
        **_QUIET,
    )


class RayCluster:
    """One run's Ray. `start` and `close` block for seconds."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._owned = False
        self._doors: dict[str, tuple[str, int]] = {}

    def start(self) -> None:
        """Join the recipe's cluster or the Ray of this process, or start a local one that has as many logical CPUs as
        the run needs."""
        config = self._context.config
        if not ray.is_initialized():
            self._owned = True
            if address := config.runtime.ray_address:
                ray.init(address=address, namespace=self._context.run, **_QUIET)
            else:
                start_local_ray(max(os.cpu_count() or 1, cpus_of(plan(config))))
        self._doors = _doors()

    async def check(self) -> None:
        """Whether Ray is still there. Without its node or its control service Ray ends this process after some seconds,
        or minutes, without a word.

        Raises:
            RunFailed: it is gone; the message says how to go on.
        """
        for what, (host, port) in self._doors.items():
            if await asyncio.to_thread(_is_refused, host, port):
                self._doors = {}
                raise RunFailed(
                    f"{what} at {host}:{port} is gone, and with it every process of the run;"
                    f" go on with: headrace train --resume {self._context.run}"
                )

    @property
    def is_up(self) -> bool:
        """Whether it was started and was not found to be gone."""
        return bool(self._doors)

    def close(self) -> None:
        """Leave it; end it if it is this run's own."""
        self._doors = {}
        if self._owned:
            ray.shutdown()
            self._owned = False


def _doors() -> dict[str, tuple[str, int]]:
    """Where what this process cannot do without listens."""
    context = ray.get_runtime_context()
    own = context.get_node_id()
    (node,) = [each for each in ray.nodes() if each["NodeID"] == own]  # type: ignore[no-untyped-call]
    host, _, port = context.gcs_address.rpartition(":")
    return {
        "the control service of the Ray cluster (GCS)": (host, int(port)),
        "the Ray process of this node (raylet)": (node["NodeManagerAddress"], node["NodeManagerPort"]),
    }


def _is_refused(host: str, port: int) -> bool:
    """Only a refused connection is a verdict; what is slow or far away, Ray itself will judge."""
    try:
        socket.create_connection((host, port), _PROBE_DEADLINE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False

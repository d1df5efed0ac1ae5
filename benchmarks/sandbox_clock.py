"""What something costs: processor time of this process and of all children, and wall time."""

import atexit
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Sample:
    """One repetition: milliseconds an operation."""

    cpu_ms: float
    wall_ms: float


class ProcessorClock:
    """Processor time of this process and of all that descend from it, also of those that nobody waits for.

    A control group counts it, where one can be made (version 1). Without one, those are missing that nobody waited for
    or that still run, in all systems alike; then the targets are held against wall time alone.
    """

    def __init__(self) -> None:
        self._folder = Path(f"/sys/fs/cgroup/cpuacct/headrace-bench-{os.getpid()}")
        self.exact = False
        with contextlib.suppress(OSError):
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
            self.exact = True

    def now_s(self) -> float:
        """Seconds so far."""
        if self.exact:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    def close(self) -> None:
        """Leave the group, and remove it."""
        if self.exact:
            (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))
            with contextlib.suppress(OSError):  # something still ends in it
                self._folder.rmdir()


CLOCK = ProcessorClock()
atexit.register(CLOCK.close)


@contextlib.contextmanager
def clocked(samples: list[Sample], count: int) -> Iterator[None]:
    """Append what the block cost for each of `count` operations."""
    cpu_s, wall_s = CLOCK.now_s(), time.perf_counter()
    yield
    wall_s, cpu_s = time.perf_counter() - wall_s, CLOCK.now_s() - cpu_s
    samples.append(Sample(1e3 * cpu_s / count, 1e3 * wall_s / count))

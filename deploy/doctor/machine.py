"""The machine itself: Python, cores, memory, disks, GPU, and what the kernel allows."""

import platform
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from headrace.deploy.doctor.host import Host
from headrace.deploy.doctor.probes import Probe
from headrace.deploy.doctor.report import Check, Status

GROUP = "machine"
GIB = 2**30
OLDEST_PYTHON, FIRST_PYTHON_TOO_NEW = (3, 11), (3, 14)
FEW_CORES = 2
LITTLE_MEMORY = 4 * GIB
LITTLE_DISK = 2 * GIB
LITTLE_SHARED_MEMORY = GIB
FEW_FILES = 4096
_NVIDIA_SMI_DEADLINE_S = 5.0


def machine_probes(host: Host, runs_dir: str) -> list[Probe]:
    """What is asked about the machine."""
    probe = partial(Probe, group=GROUP)
    return [
        probe(name="python", ask=lambda: [python(sys.version_info[:2])], needed=True),
        probe(name="cores", ask=lambda: [cores(host)]),
        probe(name="memory", ask=lambda: [memory(host)]),
        probe(name="runs folder", ask=lambda: [disk(host, "runs folder", runs_dir)], needed=True),
        probe(name="cache folder", ask=lambda: [disk(host, "cache folder", "~/.cache/headrace")], needed=True),
        probe(name="shared memory", ask=lambda: [shared_memory(host)]),
        probe(name="open files", ask=lambda: [open_files(host)]),
        probe(name="gpu", ask=lambda: [gpu(host)]),
    ]


def _check(name: str, status: Status, detail: str, fix: str = "") -> Check:
    return Check(group=GROUP, name=name, status=status, detail=detail, fix=fix)


def python(version: Sequence[int]) -> Check:
    """The interpreter's version, and the system that it runs on."""
    detail = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if OLDEST_PYTHON <= tuple(version) < FIRST_PYTHON_TOO_NEW:
        return _check("python", Status.OK, detail)
    return _check("python", Status.FAIL, detail, "install headrace into Python 3.11, 3.12 or 3.13")


def cores(host: Host) -> Check:
    """Cores that this process may use."""
    count = host.cores()
    if count >= FEW_CORES:
        return _check("cores", Status.OK, str(count))
    return _check("cores", Status.WARN, f"{count}: rollouts and learner take turns, so expect little overlap")


def memory(host: Host) -> Check:
    """Memory, and how much of it is free."""
    total, available = host.memory()
    detail = f"{_gib(available)} of {_gib(total)} available"
    if available >= LITTLE_MEMORY:
        return _check("memory", Status.OK, detail)
    return _check("memory", Status.WARN, f"{detail}; a run with Ray takes about {_gib(LITTLE_MEMORY)}")


def disk(host: Host, name: str, folder: str) -> Check:
    """Whether a folder can be written, and how much fits."""
    if "://" in folder:
        return _check(name, Status.OK, f"{folder} is remote and was not looked at")
    path = Path(folder).expanduser().absolute()
    free, writable = host.disk(path)
    detail = f"{_gib(free)} free at {path}"
    if not writable:
        return _check(name, Status.FAIL, f"{path} cannot be written", f"chmod u+rwx {path}, or choose another folder")
    if free < LITTLE_DISK:
        return _check(name, Status.WARN, detail, "free some space: episodes and checkpoints are kept there")
    return _check(name, Status.OK, detail)


def shared_memory(host: Host) -> Check:
    """Where Ray keeps its objects."""
    size = host.shared_memory()
    fix = "in a container: start it with --shm-size=2g"
    if size is None:
        return _check("shared memory", Status.WARN, "no /dev/shm: Ray falls back to slower files", fix)
    if size < LITTLE_SHARED_MEMORY:
        return _check("shared memory", Status.WARN, f"{_gib(size)} in /dev/shm: Ray falls back to slower files", fix)
    return _check("shared memory", Status.OK, f"{_gib(size)} in /dev/shm")


def open_files(host: Host) -> Check:
    """How many files and sockets a process may open."""
    soft, hard = host.open_files()
    if 0 <= soft < FEW_FILES:
        fix = f"ulimit -n {FEW_FILES if hard < 0 else min(FEW_FILES, hard)}"
        return _check("open files", Status.WARN, f"{soft} per process; many episodes at once need more", fix)
    return _check("open files", Status.OK, "unlimited" if soft < 0 else f"{soft} per process")


def gpu(host: Host) -> Check:
    """NVIDIA GPUs, and whether torch was built for them; torch is not imported."""
    build = _cuda_build(host)
    names = _gpu_names(host)
    if names is None:
        return _check("gpu", Status.MISSING, f"no NVIDIA driver; headrace runs on the CPU ({_build_text(build)})")
    if build is None:
        fix = "install a CUDA build of torch; its own site has the command for your driver"
        return _check("gpu", Status.WARN, f"{names}, but {_build_text(build)}", fix)
    return _check("gpu", Status.OK, f"{names} ({_build_text(build)})")


def _gpu_names(host: Host) -> str | None:
    if program := host.which("nvidia-smi"):
        done = host.run([program, "--query-gpu=name,memory.total", "--format=csv,noheader"], _NVIDIA_SMI_DEADLINE_S)
        lines = [line.strip() for line in done.output.splitlines() if line.strip()]
        if done.code == 0 and lines:
            return "; ".join(lines)
    driver = host.read(Path("/proc/driver/nvidia/version"))
    return f"driver {driver.splitlines()[0]}" if driver else None


def _cuda_build(host: Host) -> str | None:
    """The CUDA version that torch was built for, from its version file; None for a CPU build or without torch."""
    file = host.package_file("torch", "torch/version.py")
    for line in ((host.read(file) if file else None) or "").splitlines():
        if line.startswith("cuda") and "None" not in line:
            return line.rpartition("=")[2].strip(" '\"")
    return None


def _build_text(build: str | None) -> str:
    return f"torch is built for CUDA {build}" if build else "torch is a CPU build"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"

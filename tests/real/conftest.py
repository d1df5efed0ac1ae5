"""What the tests on real servers share."""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import SMALL_RUN, environment, last_json, run


@pytest.fixture(scope="session")
def small_run(lookup_model: Path, request, tmp_path_factory) -> Path:
    """A folder in which the command line has made a small run through Ray; made once for all lanes. To copy, not to
    work in."""
    shared = request.config.getoption("lanes") or tmp_path_factory.mktemp("shared")
    folder = shared / "small-run"
    with (shared / "small-run.lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp") as short:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "summary.json").exists():
            folder.mkdir()
            given = ("train", "lookup", f"model.path={lookup_model}", *SMALL_RUN, "--json")
            code, out, err = run(folder, *given, timeout_s=200, env=environment(RAY_TMPDIR=short))
            assert code == 0, err
            (folder / "summary.json").write_text(json.dumps(last_json(out)))
    return folder


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[object]:
    """The session's own Docker daemon (docker_daemon.py). Skips where it cannot be; in CI that is a failure."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a Docker daemon of our own needs root and what scripts/system.sh installs")
    from docker_daemon import DockerDaemon

    with DockerDaemon() as daemon:
        yield daemon


@pytest.fixture
def docker_host(docker_daemon, monkeypatch: pytest.MonkeyPatch) -> str:
    """DOCKER_HOST names the session's daemon."""
    monkeypatch.setenv("DOCKER_HOST", docker_daemon.url)
    return docker_daemon.url

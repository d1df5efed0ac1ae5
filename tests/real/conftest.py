"""What the tests on real servers share."""

import os
import shutil
from collections.abc import Iterator

import pytest


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

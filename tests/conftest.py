"""What the tiers share: one model, and for each lane one server and one Ray for the whole session.

Each test takes its own run id, so that nothing of one test meets another. Nothing here skips: what is missing fails.
"""

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.deploy.ray_environment import keep_ray_local

keep_ray_local()  # before any test module imports ray
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["plugins.no_skips", "plugins.lanes"]

RECIPES = Path(__file__).resolve().parent.parent / "deploy" / "recipes"


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves() -> Iterator[None]:
    """What a test file leaves open is said at its own last test, not wherever the collector happens to run next."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def lookup_model() -> Path:
    """The lookup recipe's model after its supervised stages; trained once per machine, by content hash."""
    from headrace.deploy.base_model import prepare_base_model
    from headrace.platform.config.load import load_recipe

    waits = Path.home() / ".cache" / "headrace" / "tests.lock"  # for the other lane of the tier, which makes it too
    waits.parent.mkdir(parents=True, exist_ok=True)
    with waits.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return prepare_base_model(load_recipe("lookup", [], RECIPES), lambda step: None).path


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded server for the session."""
    from headrace.platform.ledger.server import EmbeddedServer

    with EmbeddedServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A local Ray for the session, on loopback."""
    import ray

    from headrace.deploy.ray_cluster import start_local_ray

    start_local_ray(cpus=8)
    yield
    ray.shutdown()

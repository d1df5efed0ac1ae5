"""Placement groups on logical GPUs: one node with 8 of them, then four."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from headrace.deploy.placement import Placement, ray_nodes
from headrace.deploy.ray_environment import keep_ray_local
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"
pytestmark = pytest.mark.timeout(240)
DEADLINE_S = 30.0
NODE = {"num_cpus": 64, "node_ip_address": "127.0.0.1", "object_store_memory": 80 * 1024 * 1024}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    keep_ray_local()
    made = Cluster()
    made.add_node(num_gpus=8, labels={"accelerator": "h200"}, include_dashboard=False, **NODE)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def config(*changes: str) -> RunConfig:
    return load_recipe("lookup", ["serving.engine=vllm", "serving.drain=allowed", *changes], RECIPES)


def taken() -> Counter[str]:
    """GPUs that are reserved, by node."""
    counts: Counter[str] = Counter()
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED":
            for bundle, node in group["bundles_to_node_id"].items():
                counts[node] += int(group["bundles"][bundle].get("GPU", 0))
    return counts


@ray.remote
class Part:
    def gpus(self) -> int:
        return len(ray.get_gpu_ids())


async def test_one_node_apart_then_colocated_then_too_much(cluster: Cluster) -> None:
    apart = Placement(
        config(
            "serving.replicas=2",
            "learner.ranks=4",
            "resources.learner.gpus=1",
            "resources.replica={gpus: 1, tensor_parallel: 2, pool: accelerator=h200}",
        ),
        DEADLINE_S,
    )
    await apart.reserve()
    assert list(taken().values()) == [8]
    replica = Part.options(**apart.options("replica-1")).remote()
    assert await replica.gpus.remote() == 2, "its two shards' GPUs"
    with pytest.raises(ConfigError, match=r"the run needs 10 GPUs .4 learner ranks x 1, 3 replicas x 2.* has 8"):
        await apart.add_replica(2)
    await apart.remove_replica(0)
    await apart.add_replica(2)
    await apart.close()
    assert not +taken()

    together = Placement(
        config(
            "serving.replicas=2",
            "learner.ranks=8",
            "resources={layout: colocated, learner: {gpus: 1}, replica: {gpus: 1, tensor_parallel: 4}}",
        ),
        DEADLINE_S,
    )
    await together.reserve()
    assert list(taken().values()) == [8], "a rank and a shard on each"
    rank = Part.options(**together.options("learner-7")).remote()
    assert await rank.gpus.remote() == 1, "a part of one"
    await together.close()

    with pytest.raises(ConfigError, match=r"the run needs 9 GPUs .1 learner ranks x 1, 8 replicas x 1.* has 8"):
        await Placement(
            config("serving.replicas=8", "resources={learner: {gpus: 1}, replica: {gpus: 1}}"), DEADLINE_S
        ).reserve()
    assert not +taken(), "nothing was started"


async def test_four_nodes(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.add_node(num_gpus=8, **NODE)
    cluster.wait_for_nodes()
    assert len(ray_nodes()) == 4
    apart = Placement(
        config(
            "serving.replicas=6",
            "learner.ranks=8",
            "resources.learner.gpus=1",
            "resources.replica={gpus: 1, tensor_parallel: 4}",
        ),
        DEADLINE_S,
    )
    await apart.reserve()
    assert sorted(taken().values()) == [8, 8, 8, 8]
    await apart.close()

    labelled = Placement(
        config("serving.replicas=2", "resources.replica={gpus: 1, tensor_parallel: 4, pool: accelerator=h200}"),
        DEADLINE_S,
    )
    await labelled.reserve()
    (node,) = (+taken()).keys()
    assert next(each for each in ray_nodes() if each.name == node).labels["accelerator"] == "h200"
    await labelled.close()
    with pytest.raises(ConfigError, match="replica-0 needs 16 GPUs"):
        await Placement(config("resources.replica={gpus: 1, tensor_parallel: 16}"), DEADLINE_S).reserve()


def test_a_local_run_does_not_join_somebody_elses_ray(cluster: Cluster) -> None:
    code = (
        "from headrace.deploy.ray_environment import keep_ray_local; keep_ray_local()\n"
        "from headrace.deploy.ray_cluster import start_local_ray; start_local_ray(3)\n"
        "import ray; print(int(ray.cluster_resources()['CPU'])); ray.shutdown()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["3"]), done.stderr[-2000:]

"""Plans for 1 x 8 and 4 x 8 GPUs, apart and colocated, and what is said of those that no nodes can hold (P23)."""

import json

import pytest
from run_kit import RECIPES

from headrace.deploy.placement import Node, plan, shortfall
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError


def config(replicas: int, *, ranks: int = 1, workers: int = 1, engine: str = "torch", **resources) -> RunConfig:
    """The lookup recipe with these numbers of parts."""
    changes = {
        "serving.replicas": replicas,
        "serving.engine": engine,
        "serving.drain": "allowed",
        "learner.ranks": ranks,
        "rollout.workers": workers,
        "resources": resources,
    }
    return load_recipe("lookup", [f"{key}={json.dumps(value)}" for key, value in changes.items()], RECIPES)


def nodes(count: int, *, gpus: int = 8, cpus: int = 64, **labels: str) -> list[Node]:
    return [Node(name=f"n{n}", cpus=cpus, gpus=gpus, labels=labels) for n in range(count)]


GPU_LEARNER, GPU_REPLICA = {"gpus": 1, "cpus": 4}, {"gpus": 1, "cpus": 4}


def test_a_laptop_needs_no_more_than_a_cpu_for_each_part() -> None:
    wanted = plan(config(2, workers=3))
    assert [(group.name, len(group.bundles)) for group in wanted.groups] == [
        ("learner", 1),
        ("replica-0", 1),
        ("replica-1", 1),
    ]
    assert shortfall(wanted, [Node(name="laptop", cpus=6, gpus=0)]) == ""
    assert shortfall(wanted, [Node(name="laptop", cpus=5, gpus=0)]) == (
        "the run needs 6 CPUs (1 learner ranks x 1, 2 replicas x 1, 3 rollout workers x 1) and the Ray cluster has 5"
    )


@pytest.mark.parametrize(
    ("count", "replicas", "shards", "ranks"), [(1, 4, 1, 4), (1, 2, 2, 4), (1, 1, 4, 4), (4, 6, 4, 8), (4, 3, 8, 8)]
)
def test_apart_on_whole_nodes(count: int, replicas: int, shards: int, ranks: int) -> None:
    wanted = plan(
        config(
            replicas,
            ranks=ranks,
            workers=4,
            engine="vllm",
            learner=GPU_LEARNER,
            replica=GPU_REPLICA | {"tensor_parallel": shards},
        )
    )
    assert shortfall(wanted, nodes(count)) == ""
    assert sum(bundle.gpus for group in wanted.groups for bundle in group.bundles) == 8 * count
    assert {seat.gpus for name, seat in wanted.seats.items() if name.startswith("replica")} == {float(shards)}
    assert "needs" in shortfall(wanted, nodes(count, gpus=7))


@pytest.mark.parametrize(("count", "replicas", "shards"), [(1, 8, 1), (1, 2, 4), (4, 8, 4), (4, 32, 1)])
def test_colocated_every_gpu_has_a_rank_and_a_shard(count: int, replicas: int, shards: int) -> None:
    wanted = plan(
        config(
            replicas,
            ranks=replicas * shards,
            engine="vllm",
            layout="colocated",
            learner={"gpus": 1},
            replica={"gpus": 1, "tensor_parallel": shards},
        )
    )
    assert shortfall(wanted, nodes(count)) == ""
    ranks = [(seat.group, seat.bundle) for name, seat in wanted.seats.items() if name.startswith("learner")]
    assert len(set(ranks)) == 8 * count, "one rank a GPU"
    assert {seat.gpus for name, seat in wanted.seats.items() if name.startswith("learner")} == {0.5}
    first = wanted.seats["replica-0"].environment
    assert first["VLLM_RAY_BUNDLE_INDICES"] == ",".join(map(str, range(shards)))
    assert first["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"


def test_a_replica_that_fits_no_node_is_named() -> None:
    resources = {"replica": GPU_REPLICA | {"tensor_parallel": 8}}
    missing = shortfall(plan(config(1, engine="vllm", **resources)), nodes(4, gpus=4))
    assert missing.startswith("replica-0 needs 8 GPUs and 4 CPUs on one node, and the nodes have left")


def test_pools_are_labels_of_nodes() -> None:
    resources = {"replica": {"gpus": 1, "pool": "accelerator=h200"}, "worker": {"pool": "tier=cpu"}}
    wanted = plan(config(2, **resources))
    assert "label accelerator=h200, and no node has that label" in shortfall(wanted, nodes(2, tier="cpu"))
    labelled = [*nodes(1, accelerator="h200"), *nodes(1, gpus=0, tier="cpu")]
    assert shortfall(wanted, labelled) == ""
    small = [*nodes(1, gpus=1, accelerator="h200"), *nodes(1, gpus=8, tier="cpu")]
    assert "replica-1 needs 1 GPUs" in shortfall(wanted, small)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replica": {"tensor_parallel": 2}}, "needs serving.engine=vllm and resources.replica.gpus=1"),
        ({"layout": "colocated"}, "as many ranks .learner.ranks=1. as shards"),
        ({"replica": {"pool": "h200"}}, "pool"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(2, **changes)

"""SIGKILL of everything, at random moments and at failpoints of a running `lookup-slow`: never lost, never twice."""

import json
from collections import Counter
from pathlib import Path

import pytest
from command_line import HEADRACE, environment, start
from ray.cluster_utils import Cluster

from headrace.platform.store.events import Events, RunEvent
from headrace.platform.testing.failpoints import FAILPOINTS
from headrace.platform.testing.kills.audit import audit
from headrace.platform.testing.kills.plan import GROUP, PARTS, kill_plan
from headrace.platform.testing.kills.soak import SoakRun, soak

STEPS, QUIET_STEPS = 60, 10
KILLS, GROUPS = 22, 3
CHECKPOINT_EVERY = (5, 1, 3, 2)  # of the first run, the second, …; at most so many runs


def recipe(model: Path, seed: int, *changes: str) -> list[str]:
    return [
        "lookup-slow",
        f"model.path={model}",
        "model.tiny_llama=null",
        "sft=null",
        f"seed={seed}",
        f"learner.steps={STEPS}",
        "learner.lr=1e-3",
        "runtime.max_restarts=20",
        "eval.tasks=256",
        *changes,
    ]


@pytest.mark.timeout(1500)
def test_kills_at_random_moments_and_at_failpoints(lookup_model, tmp_path):  # P3, P5, P6, P8; cases Q1, Q21, S5, X17
    plan = kill_plan(4, KILLS, groups=GROUPS)
    assert {kill.kind for kill in plan} == {GROUP, *PARTS, *FAILPOINTS}
    done: list[str] = []
    for number, every in enumerate(CHECKPOINT_EVERY):
        overrides = recipe(lookup_model, number, f"learner.checkpoint_every={every}")
        run = SoakRun(tmp_path / str(number), HEADRACE, overrides, env=environment())
        outcome = soak(run, plan[len(done) :][: KILLS // 2], STEPS - QUIET_STEPS)
        done += [killed.kind for killed in outcome.killed]
        assert outcome.holds, (outcome.audit, outcome.killed)
        assert outcome.summary["fates"]["in_flight"] == 0
        assert outcome.summary["learner_steps"] == STEPS
        assert outcome.summary["success_after"] >= 0.9
        if len(done) == len(plan):
            break
    assert len(done) >= 20
    assert Counter(done)[GROUP] <= 5


@pytest.fixture
def cluster():
    """A head that has room for one part, and a second node with room for the rest."""
    address = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 * 1024 * 1024}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **address})
    try:
        yield cluster, lambda: cluster.add_node(num_cpus=3, **address)
    finally:
        cluster.shutdown()


@pytest.mark.timeout(600)
def test_a_node_dies(cluster, lookup_model, valkey_url, tmp_path):  # P23
    """Its parts go to a node that joins later; until then they wait."""
    cluster, add_node = cluster
    node = add_node()
    joining = ("--ray-address", cluster.address, "--redis-url", valkey_url)
    arguments = recipe(lookup_model, 0, "learner.steps=30", f"runs_dir={tmp_path / 'runs'}")
    process = start(tmp_path, "train", *arguments, *joining, "--json")
    run = SoakRun(tmp_path, HEADRACE, [])
    try:
        run.watch(process)
        run.wait_step(2)
        cluster.remove_node(node, allow_graceful=False)
        add_node()
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, err[-3000:]
    summary = json.loads(out.strip().splitlines()[-1])
    assert sum(summary["restarts"].values()) >= 2, "two of three parts were on that node"
    assert summary["equation_holds"] and summary["learner_steps"] == 30
    assert audit(str(run.root), summary).holds
    died = [each["part"] for each in Events(str(run.root), lambda: 0.0).read() if each["event"] == RunEvent.PART_DIED]
    assert set(died) == set(summary["restarts"])

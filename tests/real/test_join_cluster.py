"""`--ray-address` and `--redis-url`: a run joins a Ray and a server that others started, and leaves both running."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import redis
from command_line import environment, last_json, run

HEAD = """
import sys
import ray
from headrace.deploy.ray_cluster import start_local_ray
start_local_ray(cpus=4)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
assert ray.is_initialized() and ray.cluster_resources()["CPU"] == 4
print("still here", flush=True)
"""


@pytest.fixture
def head() -> Iterator[subprocess.Popen[str]]:
    """A Ray in a process of its own; it ends when its input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(240)
def test_a_run_joins_and_leaves_everything_running(head, lookup_model, valkey_url, tmp_path):
    address = head.stdout.readline().strip()
    code, out, err = run(
        tmp_path,
        "train",
        "lookup",
        f"model.path={lookup_model}",
        "model.tiny_llama=null",
        "sft=null",
        "learner.steps=3",
        "learner.batch_groups=4",
        "eval.tasks=16",
        "--ray-address",
        address,
        "--redis-url",
        valkey_url,
        "--json",
        timeout_s=200,
    )
    assert code == 0, err[-3000:]
    summary = last_json(out)
    assert (summary["learner_steps"], summary["equation_holds"], summary["fates"]["in_flight"]) == (3, True, 0)
    assert (tmp_path / "runs" / summary["run"] / "base" / "config.json").is_file(), "other nodes need the model too"
    assert redis.Redis.from_url(valkey_url).ping()
    said, _ = head.communicate(input="", timeout=60)
    assert "still here" in said

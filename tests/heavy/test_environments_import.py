"""The full environment holds together: the big libraries load in one process."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json
import ray, torch, transformers, vllm, deepspeed
print(json.dumps({module.__name__: module.__version__ for module in (ray, torch, transformers, vllm, deepspeed)}))
"""


@pytest.mark.timeout(300)
def test_vllm_deepspeed_and_ray_load_together():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-3000:]
    versions = json.loads(ended.stdout.strip().splitlines()[-1])
    assert set(versions) == {"ray", "torch", "transformers", "vllm", "deepspeed"}
    assert all(versions.values())

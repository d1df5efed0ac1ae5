"""There is no way to a world's `step` but through the gateway's guard (docs/design.md section 6.7)."""

import ast
from pathlib import Path

import pytest

import headrace
from headrace.actors.gateway.guard import GuardedEnvironment
from headrace.actors.worlds import Worlds
from headrace.platform.config import EnvironmentConfig
from headrace.platform.records.ids import AttemptId

ROOT = Path(headrace.__file__).parent

# Who may call a `step`, and why.
STEPS = {
    "actors/episode.py": "plays what Worlds gives it",
    "actors/oracle.py": "plays what Worlds gives it",
    "actors/replay.py": "its own execution's",
    "actors/replaying/branch.py": "its own execution's",
    "actors/replaying/execution.py": "plays what Worlds gives it",
    "actors/gateway/guard.py": "the guard",
    "actors/gateway/redteam/catalogue/keys.py": "a stage's",
    "actors/gateway/redteam/catalogue/approvals.py": "a stage's",
    "actors/gateway/redteam/stage.py": "attacks behind the guard; without it, what they would do to a made-up world",
    "actors/environments/base.py": "a re-execution of what was allowed",
    "actors/environments/faulty.py": "behind the guard",
    "actors/environments/late.py": "behind the guard",
    "actors/environments/sandboxed.py": "behind the guard",
    "actors/remote/host_session.py": "on a host, for a worker whose guard has asked",
    "deploy/environment_check/checking.py": "the conformance suite, on its author's machine",
    "deploy/environment_check/scripts.py": "the conformance suite, on its author's machine",
    # steps of other things
    "serving/vllm_loader.py": "a change of weights",
    "deploy/runtime_inprocess.py": "the learner's",
    "deploy/train.py": "the learner's",
    "trainer/learner_actor.py": "the learner's",
    "trainer/one_step.py": "the learner's",
    "trainer/backends/torch.py": "an optimizer's",
    "trainer/backends/deepspeed.py": "an optimizer's",
    "trainer/critic.py": "an optimizer's",
    "trainer/sft.py": "an optimizer's",
}
# Who may make a session that is not guarded.
UNGUARDED = {
    "actors/worlds.py": "guards it",
    "actors/remote/offer.py": "on a host, for a worker whose guard has asked",
    "deploy/environment_check/scoring.py": "the conformance suite, on its author's machine",
}


def calls(names):
    found = set()
    for layer in ("platform", "actors", "serving", "trainer", "deploy"):
        for path in (ROOT / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    if name in names and "testing/conformance" not in str(path):
                        found.add(str(path.relative_to(ROOT)))
    return found


def test_only_these_files_call_a_step():
    assert calls({"step"}) == set(STEPS)


def test_only_these_files_make_a_session_that_is_not_guarded():
    assert calls({"as_async"}) == set(UNGUARDED)


@pytest.mark.parametrize("more", [{}, {"sandbox": "bubblewrap"}, {"pool": "ws://127.0.0.1:1"}, {"tools": ["shell"]}])
async def test_every_session_of_a_recipe_is_guarded(more):
    faults = ({"kind": "failed_reset", "rate": 0.5},)
    config = EnvironmentConfig.model_validate({"name": "lookup", "faults": faults, **more})
    worlds = Worlds((config,), "train", 0)
    setting = worlds.setting(0)
    for attempt in (None, AttemptId("run", 0, 0)):
        assert isinstance(worlds.session(setting, attempt), GuardedEnvironment)
    assert isinstance(worlds.async_environment(config), GuardedEnvironment)
    await worlds.resources.close()

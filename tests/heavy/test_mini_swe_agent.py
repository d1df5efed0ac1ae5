"""mini-swe-agent as it comes from PyPI, in an environment of its own, plays episodes; they reach the learner complete.

The policy is scripted, for a tiny model writes no shell commands: what is tested is the way from somebody else's agent
loop through the door and the ledger into a learner's step.
"""

import asyncio
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.rendering import load_renderer
from headrace.deploy.base_model import prepare_base_model
from headrace.deploy.context import POLICY_ID
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import create_run
from headrace.platform.config.load import load_recipe
from headrace.platform.records import FaultOwner, Message, Role, ToolCall
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.testing.fakes.engine import ScriptedEngine

pytestmark = pytest.mark.timeout(900)
PACKAGE = "mini-swe-agent==2.4.6"
AGENT = '''
"""The package's default loop, model and environment; all that is headrace's is the last request."""

import json
import os
import urllib.request

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

task = json.loads(os.environ["HEADRACE_TASK"])["messages"][-1]["content"]
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy"),
    LocalEnvironment(cwd=os.getcwd()),
    system_template="You act through bash.",
    instance_template="{{task}}",
    step_limit=5,
)
result = agent.run(task)
request = urllib.request.Request(
    os.environ["HEADRACE_EPISODE_URL"] + "/finish",
    json.dumps({"info": {"submission": result["submission"], "exit_status": result["exit_status"]}}).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request, timeout=30).read()
'''
GRADE = """
from headrace.platform.records.message import RewardComponent
from headrace.platform.records.status import RewardKind


class Grade:
    version = "1"

    def score(self, task, episode):
        submission = episode.metadata["harness"]["info"]["submission"].strip()
        return (RewardComponent(RewardKind.OUTCOME, float(submission == task.data["answer"]), evidence=submission),)

    def score_group(self, task, episodes):
        return [self.score(task, episode) for episode in episodes]
"""
RECIPE = """\
name: swe
environments:
  - name: harness
    args:
      command: [%s, %s]
      env: {MSWEA_SILENT_STARTUP: "1", MSWEA_COST_TRACKING: ignore_errors, LITELLM_LOCAL_MODEL_COST_MAP: "True"}
    tasks: {source: ./tasks.jsonl}
    scorer: {kind: "./grade.py:Grade"}
    budgets: {max_turns: 6, max_tokens: 2000, max_seconds: 240}
    sampling: {temperature: 1.0, max_new_tokens: 400}
model:
  tiny_llama: {vocabulary: bytes, hidden: 32, heads: 2, layers: 1, intermediate: 64, max_positions: 2000}
runtime: {kind: inprocess}
learner:
  algorithm: {name: grpo, group_size: 2}
  batch_groups: 1
  steps: 1
eval: {tasks: 2}
"""


@pytest.fixture(scope="module")
def agent_python() -> Path:
    """The interpreter of a virtual environment with mini-swe-agent, made once per machine."""
    folder = Path.home() / ".cache" / "headrace" / "tests" / f"{PACKAGE.replace('==', '-')}-{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "complete"
        if not done.is_file():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=120)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", PACKAGE], check=True, timeout=400)
            done.touch()
    return folder / "bin" / "python"


def commands_of(group_sample: int) -> list[str]:
    """The second member of a group writes the wrong word."""
    word = "hello" if group_sample == 0 else "goodbye"
    return [f"echo {word} > note.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat note.txt"]


def test_its_episodes_reach_the_learner(agent_python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "grade.py").write_text(GRADE)
    rows = [f'{{"prompt": "Write hello into note.txt and submit it ({n}).", "answer": "hello"}}' for n in range(40)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "swe.yaml").write_text(RECIPE % (agent_python, tmp_path / "agent.py"))
    config = load_recipe("./swe.yaml", [f"runs_dir={tmp_path / 'runs'}"], tmp_path)
    model = prepare_base_model(config, lambda step: None).path
    renderer = load_renderer(model)

    def says(request):
        """A thought and a command in a call, as the model's own template writes them."""
        turn = int(request.key.rsplit("/", 1)[1])
        command = commands_of(int(request.session.split(".")[-2]))[turn]
        said = Message(Role.ASSISTANT, "", tool_calls=(ToolCall("bash", {"command": command}),))
        return renderer.said([Message(Role.USER, "u"), said], ())

    async def trained():
        context, root = create_run(config)
        runtime = InprocessRuntime(context)
        await runtime.prepare()
        runtime._engine = ScriptedEngine(says, versions=(), policy_id=POLICY_ID)
        await runtime.begin(model)
        try:
            return await runtime.step(), root
        finally:
            await runtime.stop_rollouts()
            await runtime.close()

    report, root = asyncio.run(trained())
    episodes = sorted(EpisodeStore(root.url).iterate(), key=lambda episode: episode.attempt_id)
    assert [episode.fault for episode in episodes] == ["", ""]
    assert (report.version, report.episodes, report.score_mean) == (1, 2, 0.5)
    assert report.loss_tokens == sum(episode.action_tokens for episode in episodes)
    for episode in episodes:
        assert episode.fault_owner is FaultOwner.NONE
        calls = [record.arguments["command"] for turn in episode.turns for record in turn.tool_calls]
        assert calls == commands_of(episode.attempt_id.sample)
        assert "<returncode>0</returncode>" in episode.turns[2].content
        notes = episode.metadata["harness"]
        assert (notes["segments_opened"], notes["agents"], notes["info"]["exit_status"]) == (0, 1, "Submitted")

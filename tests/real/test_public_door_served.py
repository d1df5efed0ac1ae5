"""The public door with a real server, the torch engine and the `openai` client: harnesses train, runs are served."""

import asyncio
import io
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import numpy as np
import openai
import pytest
import torch
from command_line import environment, last_json, start
from transformers import AutoModelForCausalLM

from headrace.actors.rendering import load_renderer
from headrace.deploy.progress import PlainProgress, RunState
from headrace.deploy.runtime_inprocess import InprocessRuntime
from headrace.deploy.train import create_run, train
from headrace.platform.config.load import load_recipe
from headrace.platform.records import FaultOwner, Role
from headrace.platform.records.status import Purpose
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.tables import RewardTable

pytestmark = pytest.mark.timeout(300)
TOKEN = "a-token-of-this-test"
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
RECIPE = """\
name: talk
environments:
  - name: harness
    alias: talk
    args: {port: %d, token: "${env:DOOR_TOKEN}", system: "Say a.", shown: [hint]}
    tasks: {source: ./tasks.jsonl}
    scorer: {kind: "./grade.py:Grade"}
    budgets: {max_turns: 6, max_tokens: 400, max_seconds: 60}
    sampling: {temperature: 1.0, max_new_tokens: 6}
model:
  tiny_llama: {vocabulary: bytes, hidden: 32, heads: 2, layers: 1, intermediate: 64, max_positions: 400}
runtime: {kind: inprocess}
learner:
  algorithm: {name: grpo, group_size: 2}
  batch_groups: 2
  steps: 2
eval: {tasks: 2}
"""
GRADE = '''
from headrace.platform.records.message import RewardComponent
from headrace.platform.records.status import RewardKind


class Grade:
    """The evidence counts as much as what was said: both reach the scorer."""

    version = "1"

    def score(self, task, episode):
        said = sum(int(turn.token_ids.sum()) for turn in episode.turns if turn.is_action)
        assert episode.metadata["harness"]["info"] == {"turns": 2}
        return (RewardComponent(RewardKind.OUTCOME, (said % 97) / 97),)

    def score_group(self, task, episodes):
        return [self.score(task, episode) for episode in episodes]
'''


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def play_one(client: openai.OpenAI, opened: dict) -> None:
    """What a harness does with an episode: it knows the base URL and nothing else of headrace."""
    said = list(opened["task"]["messages"])
    for turn in range(2):
        answer = client.chat.completions.create(model="any", messages=said, tools=TOOLS, temperature=0.2)
        said.append(answer.choices[0].message.model_dump(exclude_none=True))
        said.append({"role": "user", "content": f"more {turn}"})
    # A helper with a context of its own, whose answer is trained as well.
    client.chat.completions.create(model="any", messages=[{"role": "system", "content": "Help."}, said[-1]])


@contextmanager
def harness(port: int) -> Iterator[list[dict]]:
    """Plays whatever the door offers, until the block ends; the answers to `finish`."""
    over, finished, errors = threading.Event(), [], []

    def work() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with (
            httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as http,
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN) as client,
        ):
            while not over.is_set():
                try:
                    response = http.post("/episodes", json={"wait_s": 1}, timeout=20)
                except httpx2.TransportError:  # not open yet, or not any more
                    time.sleep(0.05)
                    continue
                if response.status_code in (429, 503):  # none waits, or the run is ending
                    continue
                opened = response.json()
                try:
                    play_one(client.with_options(base_url=opened["base_url"]), opened)
                    done = http.post(f"/episodes/{opened['id']}/finish", json={"info": {"turns": 2}}, timeout=20)
                    finished.append(done.json())
                except Exception as error:
                    if getattr(error, "status_code", 0) != 410:  # the run ended in the middle of it
                        errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield finished
    finally:
        over.set()
        thread.join()
    assert not errors, errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose episodes were all played by a harness over HTTP: its folder, summary, root and answers."""
    folder, port = tmp_path_factory.mktemp("talk"), free_port()
    (folder / "grade.py").write_text(GRADE)
    rows = [f'{{"prompt": "go {n}", "hint": {n}, "answer": "secret"}}' for n in range(40)]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "talk.yaml").write_text(RECIPE % port)
    with pytest.MonkeyPatch.context() as patch, harness(port) as finished:
        patch.setenv("DOOR_TOKEN", TOKEN)
        patch.chdir(folder)
        config = load_recipe("./talk.yaml", [f"runs_dir={folder / 'runs'}"], folder)
        context, root = create_run(config)
        state = RunState(context.run)
        runtime = InprocessRuntime(context)
        summary = asyncio.run(train(context, root, runtime, state, PlainProgress(state, io.StringIO())))
    return folder, summary, root, finished


def test_what_a_harness_plays_is_trained(trained):
    _, summary, root, finished = trained
    assert summary["learner_steps"] == 2
    assert summary["fates"]["trained"] >= 8
    assert summary["fates"]["failed"] == 0
    episodes = [each for each in EpisodeStore(root.url).iterate() if each.purpose is Purpose.TRAIN]
    assert len(episodes) >= 8
    for episode in episodes:
        assert episode.fault_owner is FaultOwner.NONE
        assert episode.environment == "harness"
        assert [each.agent_id for each in episode.turns if each.role is Role.ASSISTANT] == ["", "", "1"]
        assert episode.turns[-1].segment == 0
        notes = episode.metadata["harness"]
        assert (notes["tools"], notes["segments_opened"], notes["ignored"]) == ("external", 0, ["temperature"])
        assert {each.sampling.temperature for each in episode.turns if each.sampling} == {1.0}
    assert {each["status"] for each in finished} == {"OK"}
    assert all("reward" not in each and "score" not in each for each in finished)
    rewards = {row.episode_id for row in RewardTable(root.url, "rollout-0").rows() if row.valid}
    assert {episode.episode_id for episode in episodes} <= rewards


@pytest.fixture(scope="module")
def served(trained):
    """`headrace serve` over the trained run: its address, and the process."""
    folder, summary, _, _ = trained
    env = environment(SERVE_TOKEN=TOKEN, DOOR_TOKEN=TOKEN)
    args = ("serve", summary["run"], "--version", "1", "--port", "0", "--token", "${env:SERVE_TOKEN}", "--json")
    process = start(folder, *args, env=env)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield last_json(line), process
    finally:
        process.kill()
        process.communicate()


def client_of(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served[0]["address"], api_key=TOKEN, max_retries=0)


def test_a_served_version_reports_what_it_sampled(trained, served):
    _, _, root, _ = trained
    with client_of(served) as client:
        assert [each.id for each in client.models.list()] == ["policy", "policy@v1"]
        messages = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(
            model="policy@v1",
            messages=messages,
            tools=TOOLS,
            max_tokens=8,
            temperature=0.7,
            seed=3,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        again = client.chat.completions.create(
            model="policy@v1", messages=messages, tools=TOOLS, max_tokens=8, temperature=0.7, seed=3, stream=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        streamed = [choice for chunk in again for choice in chunk.choices]
    choice = answer.choices[0]
    assert [each.token_ids for each in streamed if hasattr(each, "token_ids")] == [choice.token_ids]
    folder = next((root.local("versions")).glob("*-v000001"))
    renderer = load_renderer(folder)
    assert "look" in renderer.decode(answer.prompt_token_ids)  # the tools are in the prompt
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [*answer.prompt_token_ids, *choice.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    start_at = len(answer.prompt_token_ids)
    rows = torch.log_softmax(logits[start_at - 1 : -1] / 0.7, -1)
    wanted = rows[torch.arange(len(choice.token_ids)), torch.tensor(choice.token_ids)]
    np.testing.assert_allclose([each.logprob for each in choice.logprobs.content], wanted.numpy(), atol=1e-4)


def test_texts_token_ids_and_errors(served):
    with client_of(served) as client:
        done = client.completions.create(
            model="policy", prompt=[104, 105], max_tokens=5, extra_body={"return_token_ids": True}
        )
        assert done.choices[0].prompt_token_ids == [104, 105]
        assert done.usage.completion_tokens == len(done.choices[0].token_ids) <= 5
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="policy@v9", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="one choice"):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}], n=2)
    with (
        openai.OpenAI(base_url=served[0]["address"], api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_sigterm_drains(served):
    address, process = served
    root = address["address"].removesuffix("/v1")
    assert httpx2.get(f"{root}/health").json() == {"status": "ok", "newest": 1}
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    with pytest.raises(httpx2.TransportError):
        httpx2.get(f"{root}/health")

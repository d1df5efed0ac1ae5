"""New weights while an episode is played: through the loop, with an engine that computes them, and in its record."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from episode_kit import World, ends, generation, goes_on, make_plan, play, turn_of, whole_context
from torch_engine_kit import make_engine, manifest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from worker_kit import SIZE, Bench

from headrace.platform.errors import FidelityError
from headrace.platform.fidelity import check_episode
from headrace.platform.records import (
    AttemptId,
    Budgets,
    Purpose,
    SamplingParams,
    Status,
    UpdateMode,
    VersionRef,
    VersionSpan,
)
from headrace.platform.testing.episodes import make_episode, policy_turn
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.renderer import VOCABULARY

STICKY, TURN, INFLIGHT = UpdateMode.STICKY, UpdateMode.TURN, UpdateMode.INFLIGHT
POSITIONS = 192
LENGTH = 16
TURNS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            intermediate_size=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=POSITIONS,
        )
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, 0.0, 0.25)
        folders.append(str(tmp_path_factory.mktemp("model")))
        model.save_pretrained(folders[-1])
    return folders


class Published:
    """A torch engine to which version n is published in the middle of turn n."""

    def __init__(self, folders):
        self.engine = make_engine(max_positions=POSITIONS)
        self.folders = folders
        self.asked = []

    async def publish(self, number):
        await self.engine.load(manifest(number), self.folders[number])

    async def generate(self, request):
        self.asked.append((request.version, request.update_mode))
        running = asyncio.ensure_future(self.engine.generate(request))
        number = turn_of(request)
        if number in (1, 2):
            mate = msgspec.structs.replace(request, session="mate", sampling=SamplingParams(max_new_tokens=5))
            await self.engine.generate(mate)  # both have sampled a few tokens
            await self.publish(number)
        return await running

    async def release(self, session):
        await self.engine.release(session)


@pytest.fixture
async def published(folders):
    published = Published(folders)
    await published.publish(0)
    yield published
    await published.engine.close()


def plan_of(mode, **fields):
    values = {
        "version": VersionRef("tiny", 0),
        "sampling": SamplingParams(max_new_tokens=LENGTH),
        "budgets": Budgets(max_turns=TURNS, max_tokens=POSITIONS),
        "update_mode": mode,
    }
    return make_plan(**{**values, **fields})


def versions(episode):
    """Version numbers of each sampled turn's spans."""
    return [[span.version.number for span in turn.version_spans] for turn in episode.turns if turn.is_action]


def assert_logprobs(folders, played):
    """Every sampled token has the logprob that its span's weights give it, computed over the whole context."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    ids = whole_context(played)
    with torch.no_grad():
        expected = [torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1) for model in models]
    start = 0
    for turn in played.episode.turns:
        for span in turn.version_spans:
            rows = torch.arange(start + span.start, start + span.end)
            wanted = expected[span.version.number][rows - 1, torch.tensor(ids)[rows]]
            np.testing.assert_allclose(turn.behaviour_logprobs[span.start : span.end], wanted.numpy(), atol=1e-4)
        start += len(turn.token_ids)


@pytest.mark.parametrize(
    ("mode", "sampled", "asked"),
    [
        (STICKY, [[0], [0], [0], [0]], [0, 0, 0, 0]),
        (TURN, [[0], [0], [1], [2]], [0, 0, 0, 1]),
        (INFLIGHT, [[0], [0, 1], [1, 2], [2]], [0, 0, 1, 2]),
    ],
)
async def test_weights_that_come_in_the_middle_of_a_turn(published, folders, mode, sampled, asked):  # cases S1, S3
    played = await play(World(lambda message: goes_on("more")), published, plan=plan_of(mode))
    episode = played.episode
    assert (episode.status, episode.update_mode) == (Status.BUDGET_EXHAUSTED, mode)
    assert versions(episode) == sampled
    assert published.asked == [(version, mode) for version in asked]
    # case T20: over sampled tokens alone; the prompt has no version
    assert (episode.oldest_version, episode.newest_version) == (0, sampled[-1][-1])
    assert_logprobs(folders, played)


async def test_under_sticky_only_new_tokens_are_computed(published):
    await play(World(lambda message: goes_on("more")), published, plan=plan_of(STICKY))
    await published.engine.release("mate")
    sticky = published.engine.stats()
    assert sticky.reused_tokens > sticky.prefilled_tokens


async def test_an_episode_that_is_aborted_and_played_again_has_no_token_of_before(published, folders):  # case T22
    """Twice, each time in the middle of a turn; the next attempt begins anew under the version of its own group."""
    for attempt in (0, 1):
        plan = plan_of(STICKY, attempt_id=AttemptId("kit-run", 0, 0, attempt), version=VersionRef("tiny", attempt))
        reached = asyncio.Event()

        def step(message, reached=reached):
            reached.set()
            return goes_on("more")

        playing = asyncio.create_task(play(World(step), published.engine, plan=plan))
        await reached.wait()
        playing.cancel()
        assert [type(each) for each in await asyncio.gather(playing, return_exceptions=True)] == [
            asyncio.CancelledError
        ]
        assert published.engine.sessions(attempt) == 0
        await published.publish(attempt + 1)
    plan = plan_of(STICKY, attempt_id=AttemptId("kit-run", 0, 0, 2), version=VersionRef("tiny", 2))
    played = await play(World(lambda message: goes_on("more")), published.engine, plan=plan)
    assert versions(played.episode) == [[2]] * TURNS
    assert_logprobs(folders, played)


async def test_an_episode_never_asks_for_less_than_it_has_seen():
    """Not even where an engine answers with an older version, which the fidelity gate then refuses."""
    asked = []

    def reply(request):
        asked.append(request.version)
        return generation([1, 2], version=(3, 1, 4)[turn_of(request)])

    engine = ScriptedEngine(reply, versions=(0, 1, 3, 4))
    budgets = Budgets(max_turns=3)
    with pytest.raises(FidelityError, match="versions: turn 3: versions go back"):
        await play(World(lambda message: goes_on("more")), engine, plan=plan_of(TURN, budgets=budgets))
    assert asked == [0, 3, 3]


def mixed(*numbers, **fields):
    """A policy turn with a token of each of these versions."""
    ref = [VersionRef("policy", number) for number in numbers]
    spans = tuple(VersionSpan(one, i, i + 1) for i, one in enumerate(ref))
    return msgspec.structs.replace(policy_turn("x", tuple(range(3, 3 + len(numbers)))), version_spans=spans, **fields)


@pytest.mark.parametrize(
    ("mode", "turns", "refused"),
    [
        (INFLIGHT, [mixed(2, 3), mixed(3, 3, 5)], ""),
        (INFLIGHT, [mixed(3, 2)], "turn 0: versions go back"),
        (INFLIGHT, [mixed(2, 4), mixed(3)], "turn 1: versions go back"),
        (INFLIGHT, [mixed(1)], "turn 0: versions go back"),  # older than the group's
        (INFLIGHT, [mixed(4), mixed(3, segment=1), mixed(3, agent_id="other")], ""),  # sampled beside one another
        (TURN, [mixed(2), mixed(3), mixed(3, 3)], ""),
        (TURN, [mixed(2), mixed(3, 4)], r"turn 1: \[3, 4\] in one turn"),
        (TURN, [mixed(3), mixed(2)], "turn 1: versions go back"),
        (STICKY, [mixed(2), mixed(3)], "turn 1: policy@v3 in a sticky episode"),
    ],
)
def test_the_gate_takes_the_versions_that_the_mode_allows(mode, turns, refused):
    episode = make_episode(turns, version=2, update_mode=mode)
    if not refused:
        check_episode(episode)
        return
    with pytest.raises(FidelityError, match=f"versions: {refused}"):
        check_episode(episode)


def test_a_branch_may_go_on_under_an_older_version_than_its_parent():
    turns = [mixed(4), mixed(2)]
    check_episode(make_episode(turns, version=2, update_mode=TURN, parent_episode="p", branch_step=1))


@pytest.mark.parametrize("mode", UpdateMode)
async def test_training_plays_by_the_recipes_mode_and_evaluations_stay_pinned(tmp_path, monkeypatch, mode):  # P18
    """A group is pinned when it is dispatched; under `turn` and `inflight` that is the oldest that it may meet."""
    asked = []

    def reply(request):
        asked.append((request.session.split(".")[1][0], request.version, request.update_mode))
        return [1, 2]

    engine = ScriptedEngine(reply, versions=(0, 1))
    bench = Bench(tmp_path, monkeypatch, lambda n: World(lambda message: ends(1.0)), engine=engine, update_mode=mode)
    await bench.publish()
    bench.worker._newest_version = lambda: 0  # what the ledger knows of; the engine is ahead
    await bench.worker.play_round(1)
    assert len(await bench.worker.evaluate(0, "dev", [0], 0)) == 1
    await bench.worker.close()
    train = [each[1:] for each in asked if each[0] == "t"]
    assert train == [(0, mode)] * SIZE
    assert [each[1:] for each in asked if each[0] == "e"] == [(0, STICKY)]
    stored = {(each.purpose, each.update_mode, each.newest_version) for each in bench.store.iterate()}
    assert stored == {(Purpose.TRAIN, mode, 0 if mode is STICKY else 1), (Purpose.EVAL, STICKY, 0)}

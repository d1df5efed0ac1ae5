"""An episode that branches off a recorded one: the same turns, the same tokens, then its own way."""

import msgspec
import pytest
from episode_kit import (
    DONE,
    FORGETFUL,
    World,
    char_call,
    chatml_renderer,
    ends,
    goes_on,
    lookup_renderer,
    lookup_solution,
    lookup_task,
    lookup_words,
    make_plan,
    play,
    raises,
    turn_of,
)

from headrace.actors.environments.faulty import with_faults, with_recorded_faults
from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.replay import replay_episode
from headrace.actors.replaying.branch import Prefix
from headrace.platform.config.faults import FaultConfig
from headrace.platform.errors import CannotBranch, ConfigError, EnvironmentFault, HostAway
from headrace.platform.records import (
    AttemptId,
    Budgets,
    Message,
    Observation,
    Purpose,
    Role,
    SamplingParams,
    Status,
    StepResult,
    StopReason,
    UpdateMode,
    VersionRef,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.testing.fakes.engine import ScriptedEngine


class Heard(ScriptedEngine):
    """An engine that remembers what it was asked for."""

    def __init__(self, *replies, **options):
        super().__init__(lambda request: replies[min(turn_of(request), len(replies) - 1)], **options)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        return await super().generate(request)


def says(*replies, **options):
    return Heard(*replies, **options)


def answering(*results):
    """A world that answers with these results, one a step."""
    answers = iter(results)
    return World(lambda _: next(answers))


def stored(played):
    return episode_codec.decode(episode_codec.encode(played.episode))


@pytest.fixture
def renderer(tmp_path):
    return lookup_renderer(tmp_path)


def branch_plan(parent, step, **fields):
    values = {
        "attempt_id": AttemptId("kit-run", 0, 0, 0, Purpose.REPLAY),
        "task": parent.task,
        "seed": parent.seed,
        "prefix": parent,
        "branch_step": step,
        "budgets": parent.budgets,
    }
    return make_plan(**{**values, **fields})


async def lookup_parent(renderer, *texts, **fields):
    task = lookup_task()
    replies = lookup_words(renderer, *texts) if texts else lookup_solution(renderer, task)
    sampling = SamplingParams(16, stop_token_ids=renderer.stop_token_ids)
    return stored(
        await play(LookupEnvironment(), says(*replies), renderer, make_plan(task, sampling=sampling, **fields))
    )


@pytest.mark.parametrize("step", [0, 1, 2])
async def test_a_branch_goes_on_from_exactly_the_recorded_tokens(renderer, step):
    parent = await lookup_parent(renderer)
    engine = says(*lookup_solution(renderer, parent.task))
    plan = branch_plan(parent, step, sampling=parent.turns[1].sampling)
    played = await play(LookupEnvironment(), engine, renderer, plan)
    branch, length = stored(played), 1 + 2 * step
    assert (branch.parent_episode, branch.branch_step, branch.purpose) == (parent.episode_id, step, Purpose.REPLAY)
    assert episode_codec.encode(msgspec.structs.replace(branch, turns=branch.turns[:length])) == episode_codec.encode(
        msgspec.structs.replace(branch, turns=parent.turns[:length])
    )
    seen = [token for turn in parent.turns[:length] for token in turn.token_ids.tolist()]
    assert engine.requests[0].token_ids.tolist() == seen, "cases T1, T2"
    assert engine.requests[0].key == f"{branch.episode_id}/1/{step}", "P26"
    assert (played.score, len(branch.views), branch.status) == (1.0, 3, Status.OK)
    assert [view.turn for view in branch.views] == [1, 3, 5]
    assert branch.cost.sampled_tokens == parent.cost.sampled_tokens
    assert branch.cost.prompt_tokens == parent.cost.prompt_tokens
    assert branch.cost.tool_calls == parent.cost.tool_calls
    assert (await replay_episode(branch, LookupEnvironment())).equal


async def test_a_branch_may_go_elsewhere_under_another_version(renderer):
    parent = await lookup_parent(renderer)
    engine = says(*lookup_words(renderer, "", "v00"), versions=(4,))
    plan = branch_plan(
        parent, 1, sampling=parent.turns[1].sampling, version=VersionRef("scripted", 4), update_mode=UpdateMode.TURN
    )
    branch = (await play(LookupEnvironment(), engine, renderer, plan)).episode
    assert (branch.oldest_version, branch.newest_version, branch.version.number) == (0, 4, 4)
    assert branch.turns[1] is parent.turns[1] and branch.turns[3].content == "v00"


async def test_keys_of_a_branch_are_its_own_and_rewards_of_its_prefix_count():
    results = [goes_on("a", rewards=ends(0.25).rewards), goes_on("b"), ends(1.0)]
    first, again = answering(*results), answering(*results)
    parent = await play(first, says(char_call(1), char_call(2), DONE))
    played = await play(again, says(DONE), plan=branch_plan(parent.episode, 2))
    assert [row.turn for row in played.rewards] == [1, 5]
    assert played.score == parent.score == 1.25
    assert again.keys == [f"{played.episode.episode_id}/1/{turn}" for turn in range(3)]
    assert not set(first.keys) & set(again.keys), "P26"
    assert (again.resets, again.closed) == (first.resets, 1)


async def test_a_branch_after_a_new_segment_begins_with_that_segment():
    results = (goes_on("a"), goes_on("b"), goes_on("c"), ends(1.0))

    def sampled(engine):
        return [request.token_ids.tolist() for request in engine.requests]

    renderer = chatml_renderer(FORGETFUL)
    plan = make_plan(sampling=SamplingParams(20, stop_token_ids=renderer.stop_token_ids))
    reply = [*b"done", *renderer.stop_token_ids]
    engine = says(reply)
    parent = (await play(answering(*results), engine, renderer, plan)).episode
    assert parent.turns[-2].segment > 0
    again = says(reply)
    branch = (await play(answering(*results), again, renderer, branch_plan(parent, 2, sampling=plan.sampling))).episode
    assert sampled(again) == sampled(engine)[2:]
    assert [turn.segment for turn in branch.turns] == [turn.segment for turn in parent.turns]
    assert branch.views == parent.views


async def test_what_could_not_be_read_is_part_of_the_prefix(renderer):
    parent = await lookup_parent(renderer, "<call>get k00", "v01", budgets=Budgets(3, 64))
    assert parent.turns[1].status is Status.MODEL_INVALID_ACTION
    engine = says(*lookup_words(renderer, "", "v02"))
    branch = (
        await play(LookupEnvironment(), engine, renderer, branch_plan(parent, 1, sampling=parent.turns[1].sampling))
    ).episode
    assert [turn.content for turn in branch.turns[:3]] == [turn.content for turn in parent.turns[:3]]
    assert branch.turns[3].content == "v02"


async def test_recorded_faults_before_the_step_are_put_in_again_and_later_ones_are_not(renderer):
    task = lookup_task(hops=(3,))
    sampling = SamplingParams(16, stop_token_ids=renderer.stop_token_ids)
    faults = [FaultConfig(kind="changed_page", steps=(1, 3), text="k00")]
    replies = lookup_solution(renderer, task)
    world = with_faults(LookupEnvironment(), faults, 1, first=True)
    plan = make_plan(task, sampling=sampling, budgets=Budgets(8, 256))
    parent = stored(await play(world, says(*replies), renderer, plan))
    assert [fault.turn for fault in parent.injected_faults] == [1, 3]
    prefix = Prefix(parent, 2)
    session = with_recorded_faults(LookupEnvironment(), prefix.faults())
    branch = (await play(session, says(*replies), renderer, branch_plan(parent, 2, sampling=sampling))).episode
    assert [fault.turn for fault in branch.injected_faults] == [1]
    assert branch.turns[:5] == parent.turns[:5] or len(branch.turns) == len(parent.turns)
    assert (branch.turns[2].content, branch.turns[6].content == parent.turns[6].content) == ("k00", False)


async def test_an_accident_on_the_way_keeps_the_recorded_text():
    def world(time):
        answers = iter([goes_on("a"), ends(1.0)])
        return World(lambda _: next(answers), lambda: Observation((Message(Role.USER, f"it is {time}"),)))

    parent = (await play(world("03:04:05"), says(DONE))).episode
    branch = (await play(world("23:59:59"), says(DONE), plan=branch_plan(parent, 1))).episode
    assert branch.turns[0].content == "it is 03:04:05"


@pytest.mark.parametrize(
    "world",
    [
        World(lambda _: goes_on("other")),
        World(lambda _: ends(1.0)),
        World(raises(EnvironmentFault("gone", transient=False))),
        World(reset=raises(EnvironmentFault("gone", transient=False))),
        World(reset=lambda: Observation((Message(Role.USER, "stop"),))),
    ],
)
async def test_a_divergence_on_the_way_refuses_the_branch(world):
    parent = (await play(answering(goes_on("a"), ends(1.0)), says(DONE))).episode
    engine = says(DONE)
    with pytest.raises(CannotBranch, match="diverges at step"):
        await play(world, engine, plan=branch_plan(parent, 1))
    assert (world.closed, engine.requests) == (1, [])


async def test_a_host_that_is_gone_refuses_the_branch_and_is_no_divergence():
    parent = (await play(answering(goes_on("a"), ends(1.0)), says(DONE))).episode
    world = World(raises(HostAway("gone")))
    with pytest.raises(CannotBranch, match="may not another time: step 1: HostAway: gone"):
        await play(world, says(DONE), plan=branch_plan(parent, 1))
    assert world.closed == 1


async def test_another_version_of_the_world_refuses_the_branch():
    parent = (await play(answering(goes_on("a"), ends(1.0)), says(DONE))).episode
    world = World()
    world.version = "2"
    with pytest.raises(CannotBranch, match="version 1; the world at hand is world version 2"):
        await play(world, says(DONE), plan=branch_plan(parent, 1))
    assert world.closed == 1


@pytest.mark.parametrize(
    ("results", "budgets", "last"),
    [
        ((goes_on("a"), goes_on("b"), ends(1.0)), Budgets(), 2),
        ((goes_on("a"), StepResult((Message(Role.TOOL, "end"),), terminated=True)), Budgets(), 1),
        ((goes_on("a"), goes_on("b"), goes_on("c")), Budgets(2), 1),
        ((goes_on("a"), StepResult(status=Status.ENV_TRANSIENT)), Budgets(), 1),
    ],
)
async def test_an_end_is_no_step_to_branch_from(results, budgets, last):
    parent = (await play(answering(*results), says(DONE), plan=make_plan(budgets=budgets))).episode
    Prefix(parent, 0).check()
    Prefix(parent, last).check()
    for step in (-1, last + 1):
        with pytest.raises(ConfigError, match=f"to {last};"):
            Prefix(parent, step).check()


async def test_an_episode_that_never_began_has_no_step():
    parent = (await play(World(reset=raises(EnvironmentFault("gone"))), says(DONE))).episode
    assert parent.stop_reason is StopReason.FAULT
    with pytest.raises(ConfigError, match="gone"):
        Prefix(parent, 0).check()

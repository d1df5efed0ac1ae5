"""Playing a stored episode again, in the same world and in worlds that have changed."""

import asyncio

import msgspec
import pytest
from episode_kit import (
    DONE,
    World,
    char_call,
    ends,
    generation,
    goes_on,
    lookup_renderer,
    lookup_solution,
    lookup_task,
    lookup_words,
    make_plan,
    never,
    play,
    raises,
    says,
    turn_of,
)

from headrace.actors.environments.adapter import UnbuiltEnvironment
from headrace.actors.environments.faulty import with_faults, with_recorded_faults
from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.replay import Limits, replay_episode
from headrace.platform.config.faults import FaultConfig
from headrace.platform.errors import DeadlineExceeded, EnvironmentFault, HostAway, NotFound, SandboxDied
from headrace.platform.hashing import hash_text
from headrace.platform.records import (
    Budgets,
    HashPair,
    Message,
    Observation,
    Provenance,
    RewardComponent,
    RewardKind,
    Role,
    SamplingParams,
    Status,
    StepResult,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.codec import episode_codec
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.fakes.engine import ScriptedEngine
from headrace.platform.testing.fakes.environment import ScriptedEnvironment
from headrace.platform.testing.fakes.renderer import CALL, END


def stored(played):
    """As a replay meets it: after a hop through the store."""
    return episode_codec.decode(episode_codec.encode(played.episode))


@pytest.fixture
def renderer(tmp_path):
    return lookup_renderer(tmp_path)


async def lookup_episode(renderer, *texts, position=0, **fields):
    task = lookup_task(position)
    replies = lookup_words(renderer, *texts) if texts else lookup_solution(renderer, task)
    plan = make_plan(task, sampling=SamplingParams(16, stop_token_ids=renderer.stop_token_ids), **fields)
    return stored(await play(LookupEnvironment(), says(*replies), renderer, plan))


@pytest.mark.parametrize("position", range(4))
async def test_solved_episodes_replay_equal(renderer, position):
    episode = await lookup_episode(renderer, position=position)
    report = await replay_episode(episode, LookupEnvironment())
    assert (report.equal, report.differences, report.steps) == (True, (), len(episode.views))
    assert report.episode_id == episode.episode_id


@pytest.mark.parametrize(
    "texts",
    [
        ("v01",),
        ("<call>get k00</call>", "<call>get k31</call>", "v99"),
        ("<call>get k00", "<call>get</call>", "v01"),
        ("<call>put k00</call>", "k00"),
        ("<call>get k00</call><call>get k01</call>", "v01"),
        ("",),
    ],
)
async def test_whatever_the_model_did_its_episode_replays_equal(renderer, texts):
    report = await replay_episode(await lookup_episode(renderer, *texts), LookupEnvironment())
    assert (report.equal, report.differences) == (True, ())


@pytest.mark.parametrize("budgets", [Budgets(1), Budgets(2), Budgets(4, 12), Budgets(4, 8)])
async def test_truncated_episodes_replay_equal(renderer, budgets):
    episode = await lookup_episode(renderer, "<call>get k00</call>", budgets=budgets)
    assert episode.truncated
    assert (await replay_episode(episode, LookupEnvironment())).equal


async def test_the_environment_may_truncate_and_replays_equal():
    from headrace.platform.records import Task

    plan = make_plan(Task("t", "counter", {"max_steps": 2}))
    episode = stored(await play(ScriptedEnvironment(), says(char_call(1)), plan=plan))
    report = await replay_episode(episode, ScriptedEnvironment())
    assert (report.equal, report.steps) == (True, 2)


class Lying(LookupEnvironment):
    """Answers other than recorded, from a given step on."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    async def _step(self, message):
        self.at -= 1
        result = await super()._step(message)
        if self.at > 0 or not result.messages:
            return result
        return msgspec.structs.replace(result, messages=tuple(Message(Role.TOOL, "lie") for _ in result.messages))


class Drifting(LookupEnvironment):
    """Says the same and is in another state, from a given step on."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    async def _step(self, message):
        self.at -= 1
        result = await super()._step(message)
        return result if self.at > 0 else msgspec.structs.replace(result, state_hash=HashPair("x", "x"))


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize(("changed", "what"), [(Lying, "observation"), (Drifting, "state")])
async def test_a_changed_world_diverges_at_the_step_that_changed(renderer, changed, what, at):
    report = await replay_episode(await lookup_episode(renderer), changed(at))
    assert (report.equal, report.first_divergence) == (False, at)
    assert (report.differences[0].step, report.differences[0].what) == (at, what)
    assert report.differences[0].is_divergence
    assert report.steps == 3


async def test_a_changed_reset_diverges_at_step_zero(renderer):
    class Opens(LookupEnvironment):
        async def _reset(self, task, seed):
            observation = await super()._reset(task, seed)
            return msgspec.structs.replace(observation, messages=(Message(Role.USER, "seek"),))

    report = await replay_episode(await lookup_episode(renderer), Opens())
    assert (report.first_divergence, report.differences[0].what, report.steps) == (0, "observation", 3)


def counted(*results):
    """A world that answers with these results, one a step."""
    answers = iter(results)
    return World(lambda _: next(answers))


@pytest.mark.parametrize(
    ("replayed", "step", "what"),
    [
        ((goes_on("a"), StepResult((Message(Role.TOOL, "b"),), terminated=True)), 2, "end"),
        ((StepResult((Message(Role.TOOL, "a"),), truncated=True),), 1, "end"),
        ((goes_on("a"), goes_on("b"), goes_on("")), 3, "observation"),
        ((goes_on("a"), goes_on("b"), StepResult(truncated=True)), 3, "end"),
        ((goes_on("a"), StepResult()), 2, "observation"),
    ],
)
async def test_a_world_that_ends_otherwise_has_diverged(replayed, step, what):
    episode = stored(await play(counted(goes_on("a"), goes_on("b"), ends(1.0)), says(DONE)))
    world = counted(*replayed, ends(1.0), ends(1.0))
    report = await replay_episode(episode, world)
    assert (report.first_divergence, report.differences[0].what) == (step, what)
    assert world.closed == 1


@pytest.mark.parametrize("error", [EnvironmentFault("lost", transient=False), KeyError("k"), SystemExit(1)])
async def test_a_world_that_breaks_in_the_replay_has_diverged(error):
    episode = stored(await play(counted(goes_on("a"), ends(1.0)), says(DONE)))
    for step, world in ((0, World(reset=raises(error))), (1, World(raises(error)))):
        report = await replay_episode(episode, world)
        assert (report.first_divergence, report.differences[-1].what, report.interrupted) == (step, "fault", "")
        assert world.closed == 1


@pytest.mark.parametrize(
    "error", [SandboxDied("gone"), HostAway("gone"), EnvironmentFault("lost"), DeadlineExceeded("late"), TimeoutError()]
)
async def test_what_a_fresh_world_may_not_meet_is_no_divergence(error):
    episode = stored(await play(counted(goes_on("a"), ends(1.0)), says(DONE)))
    for step, world in ((0, World(reset=raises(error))), (1, World(raises(error)))):
        report = await replay_episode(episode, world)
        assert (report.first_divergence, report.differences, report.equal) == (None, (), False)
        assert report.interrupted.startswith(f"step {step}: {type(error).__name__}")
        assert (report.nowhere, world.closed) == (step == 0 and isinstance(error, HostAway), 1)


async def test_a_transient_answer_is_no_divergence_and_one_of_a_bug_is():
    episode = stored(await play(counted(goes_on("a"), ends(1.0)), says(DONE)))
    report = await replay_episode(episode, counted(goes_on("a"), StepResult(status=Status.ENV_TRANSIENT)))
    assert (report.first_divergence, report.interrupted[:7]) == (None, "step 2:")
    report = await replay_episode(episode, counted(goes_on("a"), StepResult(status=Status.ENV_BUG)))
    assert (report.first_divergence, report.differences[-1].what) == (2, "fault")


async def test_what_diverged_before_it_was_interrupted_has_diverged():
    episode = stored(await play(counted(goes_on("a"), ends(1.0)), says(DONE)))
    answers = iter([lambda: goes_on("other"), raises(HostAway("gone"))])
    report = await replay_episode(episode, World(lambda _: next(answers)()))
    assert (report.first_divergence, report.interrupted) == (1, "")


async def test_differences_by_accident_are_listed_and_no_divergence():
    def at(time):
        answers = iter([goes_on(f"ready at {time}", state_hash=hash_text(f"up since {time}")), ends(1.0)])
        return World(lambda _: next(answers), lambda: Observation((Message(Role.USER, f"it is {time}"),)))

    episode = stored(await play(at("03:04:05"), says(DONE)))
    report = await replay_episode(episode, at("23:59:59"))
    assert (report.equal, report.first_divergence) == (True, None)
    assert [(d.step, d.what, d.is_divergence) for d in report.differences] == [
        (0, "observation", False),
        (1, "state", False),
        (1, "observation", False),
    ]
    assert all(d.recorded.raw != d.replayed.raw for d in report.differences)


async def test_an_accident_before_a_divergence_does_not_hide_it():
    def world(time, word):
        answers = iter([goes_on(f"at {time}"), goes_on(word), ends(1.0)])
        return World(lambda _: next(answers))

    episode = stored(await play(world("03:04:05", "yes"), says(DONE)))
    report = await replay_episode(episode, world("03:04:06", "no"))
    assert report.first_divergence == 2
    assert [d.is_divergence for d in report.differences] == [False, True]


@pytest.mark.parametrize(("field", "value"), [("version", "2"), ("name", "lookdown")])
async def test_another_environment_is_refused_and_closed(renderer, field, value):
    class Other(LookupEnvironment):
        closed = False

        async def close(self):
            Other.closed = True

    setattr(Other, field, value)
    with pytest.raises(NotFound, match=value):
        await replay_episode(await lookup_episode(renderer), Other())
    assert Other.closed


async def test_an_episode_that_never_began_has_ended_from_the_record():
    episode = stored(await play(World(reset=raises(EnvironmentFault("no sandbox"))), says(DONE)))
    world = World()
    report = await replay_episode(episode, world)
    assert (report.equal, report.steps, world.closed, world.resets) == (True, 0, 1, [])
    assert report.from_record.endswith("EnvironmentFault: no sandbox")


async def test_a_step_that_was_never_answered_is_not_replayed():
    answers = iter([goes_on("a")])
    broken = World(lambda _: next(answers, None) or never())
    episode = stored(await play(broken, says(DONE), plan=make_plan(step_deadline_s=0.05)))
    assert episode.status is Status.ENV_TRANSIENT
    world = counted(goes_on("a"), goes_on("b"))
    report = await replay_episode(episode, world)
    assert (report.equal, len(world.messages)) == (True, 1)
    assert report.from_record == "fault: step outran its deadline"


async def test_actions_are_given_again_exactly_under_keys_of_their_own():
    calls = [CALL, *b'{"name":"a","arguments":{"x":[1,null,{"y":2.5}]}}', CALL, *b'{"name":"b","arguments":{}}', END]
    first = counted(goes_on("a"), goes_on("b"), ends(1.0))
    unread = [CALL, *b"{", END]
    engine = ScriptedEngine(lambda request: (calls, unread, calls, DONE)[turn_of(request)])
    episode = stored(await play(first, engine))
    again = counted(goes_on("a"), goes_on("b"), ends(1.0))
    assert (await replay_episode(episode, again)).equal
    assert again.messages == first.messages
    assert again.messages[0].tool_calls[0] == ToolCall("a", {"x": [1, None, {"y": 2.5}]}, "call-0")
    assert not set(again.keys) & set(first.keys), "P26: a replay is a branch of its own"
    assert again.keys == [key.replace("/0/", "/1/") for key in first.keys]
    assert again.resets == first.resets


async def test_text_that_is_no_text_replays_equal():
    """case X10"""
    results = (goes_on("a\ud800"), ends(1.0))
    episode = stored(await play(counted(*results), says(DONE)))
    assert (await replay_episode(episode, counted(*results))).differences == ()


async def test_a_generation_cut_short_replays_equal():
    engine = ScriptedEngine(lambda request: generation([*b"do"]) if turn_of(request) == 0 else DONE)
    results = (goes_on("a"), ends(1.0))
    episode = stored(await play(counted(*results), engine))
    assert (await replay_episode(episode, counted(*results))).equal


# --- texts, deadlines, what else is compared --------------------------------------------------------------------------


async def test_the_texts_are_shown_as_a_small_diff():
    def world(*lines):
        answers = iter([goes_on("\n".join(lines)), ends(1.0)])
        return World(lambda _: next(answers))

    same = [f"line {number}" for number in range(50)]
    episode = stored(await play(world(*same, "a"), says(DONE)))
    report = await replay_episode(episode, world(*same, "b"))
    assert report.differences[0].diff == ("@@ -50,2 +50,2 @@", " line 49", "-a", "+b")
    report = await replay_episode(episode, world(*[f"other {number}" for number in range(50)]))
    assert len(report.differences[0].diff) == 13
    assert report.differences[0].diff[-1].endswith("more lines)")


@pytest.mark.parametrize(("step", "limits"), [(0, {"reset_deadline_s": 0.05}), (1, {"step_deadline_s": 0.05})])
async def test_a_world_that_does_not_answer_in_time_is_no_divergence(step, limits):
    episode = stored(await play(World(), says(DONE)))
    world = World(reset=never) if step == 0 else World(never)
    report = await replay_episode(episode, world, limits=Limits(**limits))
    assert (report.first_divergence, report.equal, world.closed) == (None, False, 1)
    assert report.interrupted.startswith(f"step {step}: ") and "outran its deadline" in report.interrupted


async def test_a_replay_that_is_cancelled_closes_its_world():
    """case X4"""
    episode = stored(await play(World(), says(DONE)))
    began = asyncio.Event()

    async def begin(_):
        began.set()
        await never()

    world = World(begin)
    task = asyncio.create_task(replay_episode(episode, world))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.closed == 1


async def test_another_status_is_a_divergence():
    episode = stored(await play(counted(goes_on("a"), ends(1.0)), says(DONE)))
    changed = counted(goes_on("a", status=Status.MODEL_INVALID_ACTION), ends(1.0))
    report = await replay_episode(episode, changed)
    assert [(each.step, each.what) for each in report.differences] == [(1, "status")]


async def test_rewards_are_compared_where_they_are_given():
    played = await play(counted(goes_on("a"), ends(1.0)), says(DONE))
    same, other = counted(goes_on("a"), ends(1.0)), counted(goes_on("a"), ends(0.5))
    assert (await replay_episode(stored(played), same, rewards=played.rewards)).equal
    report = await replay_episode(stored(played), other, rewards=played.rewards)
    assert [(each.step, each.what) for each in report.differences] == [(2, "reward")]
    assert report.differences[0].diff[-2:] == ("-outcome 1.0", "+outcome 0.5")


async def test_rewards_of_an_episode_that_a_fault_ended_are_not_compared():
    """They were dropped when it was recorded."""
    rewarded = goes_on("a", rewards=(RewardComponent(RewardKind.PROCESS, 0.1),))
    answers = iter([rewarded])
    broken = World(lambda _: next(answers, None) or raises(EnvironmentFault("gone"))())
    played = await play(broken, says(DONE))
    assert (played.rewards, played.episode.stop_reason) == ((), "fault")
    assert (await replay_episode(stored(played), counted(rewarded), rewards=played.rewards)).equal


async def test_several_rewards_of_one_kind_at_a_step_are_all_compared(tmp_path):
    twice = StepResult(
        rewards=(RewardComponent(RewardKind.OUTCOME, 0.2), RewardComponent(RewardKind.OUTCOME, 0.8)), terminated=True
    )
    played = await play(counted(twice), says(DONE))
    RewardTable(str(tmp_path), "w").append(played.rewards)
    kept = RewardTable(str(tmp_path)).by_episode()[played.episode.episode_id]
    assert (await replay_episode(stored(played), counted(twice), rewards=kept)).equal
    for missing in range(2):
        rest = [row for number, row in enumerate(kept) if number != missing]
        report = await replay_episode(stored(played), counted(twice), rewards=rest)
        assert [(each.step, each.what) for each in report.differences] == [(1, "reward")]


class Offering(World):
    """Offers one tool."""

    def __init__(self, about, **fields):
        super().__init__(**fields)
        self.about = about

    def tools(self):
        return [ToolSpec("go", self.about, {"type": "object", "properties": {"b": {}, "a": {}}})]


async def test_other_tools_are_a_divergence_at_the_reset():
    episode = stored(await play(Offering("say x"), says(DONE)))
    assert len(episode.digests.tool_schemas) == 64
    assert (await replay_episode(episode, Offering("say x"))).differences == ()
    report = await replay_episode(episode, Offering("never call this"))
    assert (report.first_divergence, [each.what for each in report.differences]) == (0, ["tools"])
    report = await replay_episode(episode, World())
    assert (report.first_divergence, [each.what for each in report.differences]) == (0, ["tools"])
    older = msgspec.structs.replace(episode, digests=msgspec.structs.replace(episode.digests, tool_schemas=""))
    assert (await replay_episode(older, Offering("never call this"))).equal, "a record that has no digest says nothing"


async def test_tools_that_are_not_json_are_a_fault_of_the_world():
    """case X16"""
    world = Offering(object())
    played = await play(world, says(DONE))
    assert (played.episode.fault_owner, played.episode.status) == ("environment", Status.ENV_BUG)
    assert "tools are not JSON" in played.episode.fault


@pytest.mark.parametrize(("recorded", "at_hand"), [("sha256:a", "sha256:b"), ("sha256:a", "")])
async def test_another_image_is_refused_by_name(recorded, at_hand):
    episode = msgspec.structs.replace(stored(await play(World(), says(DONE))), image_digest=recorded)
    world = World()
    world.provenance = Provenance(image_digest=at_hand)
    with pytest.raises(NotFound, match=f"{recorded}.*{at_hand or 'none'}"):
        await replay_episode(episode, world)
    assert world.closed == 1


async def test_a_world_that_cannot_be_made_here_is_refused():
    episode = stored(await play(World(), says(DONE)))
    with pytest.raises(NotFound, match="no such package"):
        await replay_episode(episode, UnbuiltEnvironment("world", EnvironmentFault("no such package")))


async def test_a_host_says_its_version_when_the_session_begins():
    class Hosted(World):
        version = ""

        async def reset(self, task, seed):
            self.version = "2"
            return await super().reset(task, seed)

    episode = stored(await play(World(), says(DONE)))
    with pytest.raises(NotFound, match="version 1; the world at hand is world version 2"):
        await replay_episode(episode, Hosted())


@pytest.mark.parametrize(
    "kind", ["timeout", "lost_reply", "duplicate_effect", "server_error", "changed_page", "failed_reset"]
)
async def test_injected_faults_are_put_in_again(renderer, kind):
    config = FaultConfig(kind=kind, rate=1.0 if kind == "failed_reset" else 0.0, steps=() if "reset" in kind else (2,))
    task = lookup_task()
    plan = make_plan(task, sampling=SamplingParams(16, stop_token_ids=renderer.stop_token_ids))
    world = with_faults(LookupEnvironment(), [config], 1, first=True)
    episode = stored(await play(world, says(*lookup_solution(renderer, task)), renderer, plan))
    assert [fault.kind for fault in episode.injected_faults] == [kind]
    report = await replay_episode(episode, with_recorded_faults(LookupEnvironment(), episode.injected_faults))
    assert (report.equal, report.differences) == (True, ())
    assert bool(report.from_record) == (kind in ("timeout", "failed_reset"))
    if kind in ("duplicate_effect", "server_error", "changed_page"):
        assert (await replay_episode(episode, LookupEnvironment())).first_divergence == 2

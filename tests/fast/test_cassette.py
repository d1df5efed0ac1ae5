"""What a world asks of services outside it: recorded, answered again, and never asked again in silence."""

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
from episode_kit import DONE, World, char_call, make_plan, play, says

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.cassette import Cassette, load_cassette
from headrace.actors.replay import replay_episode
from headrace.platform.errors import EnvironmentFault, ExternalDivergence, NotFound
from headrace.platform.hashing import hash_value
from headrace.platform.records import Message, Observation, Role, StepResult, Task, ToolCall
from headrace.platform.records.codec import episode_codec


class Service:
    """A service whose answers never come twice."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"answer": (self.calls, "x")}


class Asking(ReplayedEnvironment):
    """Asks `service` at the reset and, `times` times, at each step; ends at an answer without a call."""

    name = "asking"
    version = "1"

    def __init__(self, service, times=1, ask="price"):
        self.service, self.times, self.ask = service, times, ask

    def tools(self):
        return ()

    async def _reset(self, task, seed):
        told = await self.outside({"ask": "opening"}, self.service)
        return Observation((Message(Role.USER, f"it is {told['answer'][0]}"),), hash_value(told))

    async def _step(self, message):
        if not message.tool_calls:
            return StepResult(terminated=True)
        told = [await self.outside({"ask": self.ask, "n": n}, self.service) for n in range(self.times)]
        return StepResult((Message(Role.TOOL, str(told)),), state_hash=hash_value(told))


async def recorded(world, turns=2):
    plan = make_plan(Task("t", "asking"))
    played = await play(world, says(*[char_call(1)] * turns, DONE), plan=plan)
    return episode_codec.decode(episode_codec.encode(played.episode))


async def test_an_episode_keeps_what_was_asked_and_answered_by_step():
    episode = await recorded(Asking(Service()))
    assert episode.external == {
        "0": [{"request": {"ask": "opening"}, "response": {"answer": [1, "x"]}}],
        "1": [{"request": {"ask": "price", "n": 0}, "response": {"answer": [2, "x"]}}],
        "2": [{"request": {"ask": "price", "n": 0}, "response": {"answer": [3, "x"]}}],
    }


async def test_a_replay_asks_nobody_and_states_its_gap():
    episode, service = await recorded(Asking(Service(), times=2)), Service()
    report = await replay_episode(episode, Asking(service, times=2))
    assert (report.equal, report.differences, service.calls) == (True, (), 0)
    assert (report.fidelity_gap, report.fidelity_steps, report.live_calls) == (5, (0, 1, 2), 0)


async def test_behind_wrappers_too():
    episode, service = await recorded(Asking(Service())), Service()
    with ThreadPoolExecutor(1) as threads:
        report = await replay_episode(episode, as_async(Asking(service), threads))
    assert (report.equal, report.fidelity_gap, service.calls) == (True, 3, 0)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (lambda service: Asking(service, ask="weight"), '+{"ask":"weight","n":0}'),
        (lambda service: Asking(service, times=2), '+{"ask":"price","n":1}'),
        (lambda service: Asking(service, times=0), '-{"ask":"price","n":0}'),
    ],
)
async def test_asking_for_something_else_is_a_divergence_and_never_a_call(changed, line):
    episode, service = await recorded(Asking(Service())), Service()
    report = await replay_episode(episode, changed(service))
    found = next(each for each in report.differences if each.what == "external")
    assert (report.first_divergence, found.step, service.calls) == (1, 1, 0)
    assert line in found.diff


async def test_a_world_that_hides_the_divergence_has_diverged_all_the_same():
    class Swallowing(Asking):
        async def _step(self, message):
            try:
                return await super()._step(message)
            except EnvironmentFault:
                return StepResult((Message(Role.TOOL, "nothing"),))

    episode = await recorded(Asking(Service()))
    report = await replay_episode(episode, Swallowing(Service(), ask="weight"))
    assert "external" in [each.what for each in report.differences]
    assert report.first_divergence == 1


async def test_live_asks_for_what_is_missing_and_counts_it():
    episode, service = await recorded(Asking(Service())), Service()
    report = await replay_episode(episode, Asking(service, times=2), live=True)
    assert (service.calls, report.live_calls, report.fidelity_gap) == (2, 2, 3)
    assert {each.what for each in report.differences} == {"observation", "state"}


async def test_an_accident_in_a_request_is_the_same_request():
    class Timed(Asking):
        async def _step(self, message):
            if not message.tool_calls:
                return StepResult(terminated=True)
            await self.outside({"since": self.ask}, self.service)
            return StepResult((Message(Role.TOOL, "ok"),))

    episode = await recorded(Timed(Service(), ask="03:04:05"))
    report = await replay_episode(episode, Timed(Service(), ask="23:59:59"))
    assert (report.equal, report.fidelity_gap) == (True, 3)
    assert [(each.step, each.what, each.is_divergence) for each in report.differences] == [
        (1, "external", False),
        (2, "external", False),
    ]
    assert report.differences[0].diff[-2:] == ('-{"since":"03:04:05"}', '+{"since":"23:59:59"}')
    again = await replay_episode(episode, Timed(Service(), ask="03:04:05"))
    assert (again.equal, again.differences) == (True, ())


@pytest.mark.parametrize("one", ["/tmp/a.txt", "pid 12", "08:00:00", "0.5 s"])
def test_requests_that_only_something_accidental_tells_apart_get_their_own_answers_in_any_order(one):
    other = {"/tmp/a.txt": "/tmp/b.txt", "pid 12": "pid 99", "08:00:00": "20:00:00", "0.5 s": "90.0 s"}[one]
    asked = [{"what": one}, {"what": other}]
    cassette = Cassette({"1": [{"request": request, "response": request["what"]} for request in asked]})
    for order in (asked, asked[::-1]):
        cassette.begin(1)
        assert [cassette.find(request) for request in order] == [(True, request["what"]) for request in order]
        assert (cassette.unused(), cassette.unknown(), cassette.accidental) == ([], [], {})


def test_a_second_try_of_a_step_and_a_copy_know_their_own_accidents():
    cassette = Cassette({"1": [{"request": "at 01:02:03", "response": 1}]})
    cassette.begin(1)
    assert cassette.find("at 04:05:06") == (True, 1)
    twin = copy.copy(cassette)
    cassette.begin(1)
    assert (cassette.accidental, twin.accidental) == ({}, {1: [('"at 01:02:03"', '"at 04:05:06"')]})


async def test_a_world_without_a_cassette_cannot_replay_what_was_answered():
    episode = await recorded(Asking(Service()))
    world = World()
    world.name = "asking"
    with pytest.raises(NotFound, match="--live"):
        await replay_episode(episode, world)
    assert (world.closed, world.messages) == (1, [])


def call():
    return Message(Role.ASSISTANT, tool_calls=(ToolCall("ask"),))


async def test_restore_and_clone_answer_from_the_cassette_and_then_ask():
    """The cassette is part of a snapshot, and of a clone."""
    service = Service()
    world = Asking(service)
    await world.reset(Task("t", "asking"), 1)
    first = await world.step(call(), "a")
    snapshot = await world.snapshot()
    at_snapshot = world.provenance.external
    second = await world.step(call(), "b")
    twin = await world.clone()
    assert (service.calls, twin.provenance.external) == (3, world.provenance.external)
    await world.restore(snapshot)
    assert (service.calls, world.provenance.external) == (3, at_snapshot)
    again = await world.step(call(), "c")
    assert (service.calls, again.messages == second.messages) == (4, False), "a new branch asks anew"
    assert twin.provenance.external["2"] != world.provenance.external["2"]
    assert (await twin.step(call(), "a")).messages != first.messages, "P26: its key table is empty"


async def test_a_restore_under_a_given_cassette_still_answers_from_it():
    episode, service = await recorded(Asking(Service()), turns=3), Service()
    world = Asking(service)
    load_cassette(world, episode.external)
    await world.reset(Task("t", "asking"), 1)
    await world.step(call(), "a")
    snapshot = await world.snapshot()
    second = await world.step(call(), "b")
    await world.restore(snapshot)
    twin = await world.clone()
    assert (await world.step(call(), "c")).messages == second.messages
    assert (await twin.step(call(), "c")).messages == second.messages
    assert service.calls == 0


async def test_a_step_that_broke_leaves_nothing_on_the_cassette_of_its_next_try():
    service = Service()

    class Breaking(Asking):
        broken = False

        async def _step(self, message):
            result = await super()._step(message)
            if not self.broken:
                self.broken = True
                raise EnvironmentFault("once")
            return result

    world = Breaking(service)
    await world.reset(Task("t", "asking"), 1)
    with pytest.raises(EnvironmentFault, match="once"):
        await world.step(call(), "a")
    await world.step(call(), "a")
    assert [each["response"]["answer"][0] for each in world.provenance.external["1"]] == [3]


async def test_answers_are_their_own_copies():
    class Altering(Asking):
        async def _step(self, message):
            told = await self.outside("x", self.service)
            told["answer"].clear()
            return StepResult((Message(Role.TOOL, "ok"),))

    world = Altering(Service())
    await world.reset(Task("t", "asking"), 1)
    await world.step(call(), "a")
    assert world.provenance.external["1"] == [{"request": "x", "response": {"answer": [2, "x"]}}]


async def test_questions_at_once_are_told_apart():
    class Many(Asking):
        async def _step(self, message):
            async def one(n):
                return await self.outside({"n": n}, lambda: n * 10)

            told = await asyncio.gather(*(one(n) for n in self.times))
            return StepResult((Message(Role.TOOL, str(told)),))

    world = Many(Service(), times=[1, 2, 3])
    await world.reset(Task("t", "asking"), 1)
    result = await world.step(call(), "a")
    other = Many(Service(), times=[1, 2, 3])
    load_cassette(other, {**world.provenance.external, "1": world.provenance.external["1"][::-1]})
    await other.reset(Task("t", "asking"), 1)
    assert (await other.step(call(), "a")).messages == result.messages


@pytest.mark.parametrize(("request_", "answer"), [({1, 2}, 1), (object(), 1), ("x", object()), ("x", 2**70)])
async def test_what_no_hop_can_carry_is_refused(request_, answer):
    """case X16"""

    class Odd(Asking):
        async def _step(self, message):
            await self.outside(request_, lambda: answer)
            return StepResult()

    world = Odd(Service())
    await world.reset(Task("t", "asking"), 1)
    if isinstance(request_, set):  # a set becomes a list
        await world.step(call(), "a")
        assert world.provenance.external["1"][0]["request"] == [1, 2]
        return
    with pytest.raises(EnvironmentFault, match="is not JSON"):
        await world.step(call(), "a")


async def test_the_divergence_says_what_it_expected():
    world = Asking(Service(), ask="weight")
    load_cassette(
        world,
        {
            "0": [{"request": {"ask": "opening"}, "response": {"answer": [1, "x"]}}],
            "1": [{"request": {"ask": "price", "n": 0}, "response": 1}],
        },
    )
    await world.reset(Task("t", "asking"), 1)
    with pytest.raises(ExternalDivergence, match=r'"weight".*"price"'):
        await world.step(call(), "a")

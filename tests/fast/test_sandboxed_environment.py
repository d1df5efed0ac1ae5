"""Sessions with a box: whose it is, when it ends, and snapshots that execute nothing twice."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from box_kit import KitProvider
from episode_kit import lookup_task

from headrace.actors.environments.adapter import as_async
from headrace.actors.environments.lookup import LookupEnvironment, SandboxedLookup
from headrace.actors.environments.sandboxed import SandboxedEnvironment
from headrace.platform.contracts import CommandResult
from headrace.platform.errors import EnvironmentFault, SandboxDied
from headrace.platform.hashing import hash_value
from headrace.platform.records import Message, Observation, RewardComponent, RewardKind, Role, Status, StepResult, Task
from headrace.platform.records.message import ToolCall
from headrace.platform.testing.conformance.environment import ENVIRONMENT_SUITE, EnvironmentContext

TASK = Task("t", "notes", {"limit": 4})
LOOKUP = lookup_task(hops=(2,))
FIRST, SECOND = LOOKUP.data["chain"]


class Notes(SandboxedEnvironment):
    """Writes down what is said, each with a number that is drawn, in a file of the box; four notes end it."""

    name, version = "notes", "1"

    def __init__(self, *, ending="done"):
        self.ending = ending
        self.executed = 0

    def tools(self):
        return ()

    async def _reset(self, task, seed):
        self.dice, self.notes, self.limit = random.Random(seed), 0, task.data["limit"]
        self.where = (self, self.box)
        return Observation((Message(Role.USER, "say"),), await self._hash())

    async def _step(self, message):
        self.executed += 1
        if message.tool_calls:
            wrong = (Message(Role.TOOL, "there are no tools"),)
            return StepResult(wrong, status=Status.MODEL_INVALID_ACTION, state_hash=await self._hash())
        await self.box.run(f"append '{message.content}{self.dice.randrange(1000)}' notes", 5)
        self.notes += 1
        result = await self.box.run("cat notes", 5)
        over = self.notes >= self.limit
        reward = (RewardComponent(RewardKind.OUTCOME, 1.0),) if over else ()
        seen = (Message(Role.USER, result.output),)
        return StepResult(seen, rewards=reward, terminated=over, state_hash=await self._hash())

    async def _hash(self):
        files = sorted((path, data.decode()) for path, data in self.box.files.items())
        return hash_value([files, self.notes, str(self.dice.getstate())])


class Asking(Notes):
    """Asks somebody outside for the word of each note."""

    asked = 0

    async def _step(self, message):
        def answer():
            Asking.asked += 1
            return f"word{Asking.asked}"

        word = await self.outside({"step": self.notes}, answer)
        return await super()._step(Message(Role.ASSISTANT, word))


def say(text):
    return Message(Role.ASSISTANT, text)


def get(key, name="get"):
    return Message(Role.ASSISTANT, tool_calls=(ToolCall(name, {"key": key}, "call_0"),))


def made(provider, kind=Notes, **args):
    environment = kind(**args)
    environment.use_sandboxes(provider)
    return environment


async def begun(provider, kind=Notes, task=TASK, seed=0):
    environment = made(provider, kind)
    await environment.reset(task, seed)
    return environment


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_it_conforms_and_leaves_nothing_behind(name):
    provider = KitProvider()
    context = EnvironmentContext(
        make=lambda: made(provider), task=TASK, script=[say(each) for each in "abcd"], effect=say("a")
    )
    await ENVIRONMENT_SUITE[name](context)
    assert (provider.live, provider.snapshots) == ({}, {})


@pytest.mark.parametrize("name", ENVIRONMENT_SUITE)
async def test_lookup_with_files_conforms(name):
    provider = KitProvider()
    script = [get(FIRST), get(SECOND), say(LOOKUP.data["answer"])]
    context = EnvironmentContext(
        make=lambda: made(provider, SandboxedLookup), task=LOOKUP, script=script, effect=get(FIRST)
    )
    await ENVIRONMENT_SUITE[name](context)
    assert (provider.live, provider.snapshots) == ({}, {})


# case X13
async def test_each_session_and_each_reset_has_a_box_of_its_own():
    provider = KitProvider()
    one, other = await begun(provider), await begun(provider)
    assert one.box is not other.box
    before = one.box
    await one.reset(TASK, 0)
    assert one.box is not before and not before.open
    assert list(provider.live.values()) == [other.box, one.box]
    await one.close()
    await other.close()
    assert not provider.live


async def test_with_one_place_a_session_can_reset_and_restore():
    world = await begun(KitProvider(max_boxes=1))
    saved = await world.snapshot()
    await world.reset(TASK, 0)  # P21: a session that waits for a box holds none
    await world.restore(saved)
    assert world.box.open
    await world.close()


async def test_there_is_no_box_before_reset_and_after_close():
    world = made(KitProvider())
    with pytest.raises(EnvironmentFault, match="before reset"):
        _ = world.box
    with pytest.raises(EnvironmentFault, match="before reset"):
        await world.snapshot()
    await world.reset(TASK, 0)
    await world.close()
    with pytest.raises(EnvironmentFault, match="after close"):
        _ = world.box


async def test_a_session_without_a_provider_says_what_it_needs():
    with pytest.raises(EnvironmentFault, match="sandbox: bubblewrap") as caught:
        await Notes().reset(TASK, 0)
    assert not caught.value.transient


# case E10
async def test_a_retry_after_a_dirty_failure_begins_like_the_first_attempt():
    provider = KitProvider()
    world = made(provider)
    clean = await world.reset(TASK, 3)
    await world.box.write("left-over", b"dirt")
    await world.step(say("a"), "0")
    await world.kill_box()
    with pytest.raises(SandboxDied):
        await world.step(say("b"), "1")
    await world.close()
    retry = made(provider)
    assert await retry.reset(TASK, 3) == clean
    assert await world.reset(TASK, 3) == clean, "a second reset of the same session does, too"
    await retry.close()
    await world.close()


# case X4
@pytest.mark.parametrize("steps", [("reset",), ("reset", "step", "snapshot", "restore", "step"), ("reset", "clone")])
async def test_cancelled_at_every_await_nothing_is_left(steps):
    async def episode(provider):
        world, twin, saved = made(provider), None, ""
        try:
            for number, what in enumerate(steps):
                if what == "reset":
                    await world.reset(TASK, 0)
                elif what == "step":
                    await world.step(say("a"), str(number))
                elif what == "snapshot":
                    saved = await world.snapshot()
                elif what == "restore":
                    await world.restore(saved)
                else:
                    twin = await world.clone()
        finally:  # as an episode does it: what was cancelled in closing is closed again
            for each in [world, *([twin] if twin else [])]:
                try:
                    await each.close()
                except asyncio.CancelledError:
                    await each.close()

    counting = KitProvider()
    await episode(counting)
    assert counting.calls > 2 * len(steps)
    for stop_at in range(1, counting.calls + 1):
        provider = KitProvider(stop_at=stop_at)
        await asyncio.wait([asyncio.create_task(episode(provider))])
        assert (provider.live, provider.snapshots) == ({}, {}), f"stopped at call {stop_at}"
        assert provider.places._value == 8


async def test_snapshots_bring_back_box_attributes_and_dice_and_execute_nothing_again():
    world = await begun(KitProvider(), seed=5)
    await world.step(say("a"), "0")
    saved = await world.snapshot()
    expected = [(await world.step(say(text), text)).state_hash for text in "bc"]
    world.extra = "made after the snapshot"
    await world.restore(saved)
    assert world.executed == 1
    assert not hasattr(world, "extra")
    assert [(await world.step(say(text), text)).state_hash for text in "bc"] == expected  # P26: the keys are new
    assert world.executed == 3
    assert world.where == (world, world.box), "session and box are never copied"
    await world.close()


async def test_a_clone_has_a_box_and_a_past_of_its_own():
    world = await begun(KitProvider(), seed=5)
    await world.step(say("a"), "0")
    twin = await world.clone()
    assert twin.where == (twin, twin.box) and twin.box is not world.box
    assert twin.ending == world.ending and twin.executed == 1
    for each in (world, twin):
        assert (await each.step(say("b"), "1")).messages == (await each.step(say("b"), "1")).messages
    assert world.box.files == twin.box.files
    again = await twin.clone()
    assert len(again._past.log) == 2, "a clone of a clone knows the whole past"
    for each in (world, twin, again):
        await each.close()


async def test_an_ended_session_can_go_back():
    world = await begun(KitProvider())
    saved = await world.snapshot()
    for branch in ("one", "two"):
        results = [await world.step(say(text), f"{branch}/{text}") for text in "abcd"]
        assert results[-1].terminated
        with pytest.raises(EnvironmentFault, match="after the end"):
            await world.step(say("e"), "e")
        await world.restore(saved)
    await world.close()


async def test_what_cannot_be_copied_is_said():
    provider = KitProvider()
    world = await begun(provider)
    world.numbers = (n for n in range(3))
    with pytest.raises(EnvironmentFault, match=r"notes: what it keeps .* cannot be copied .* 'generator'"):
        await world.snapshot()
    await world.close()
    assert not provider.snapshots


async def test_answers_from_outside_go_back_with_the_box():
    world = await begun(KitProvider(), Asking)
    await world.step(say("-"), "0")
    saved = await world.snapshot()
    await world.step(say("-"), "1")
    twin = await world.clone()
    assert set(twin.provenance.external) == {"1", "2"}
    await world.restore(saved)
    assert set(world.provenance.external) == {"1"}
    before = Asking.asked
    await world.step(say("-"), "1")
    assert Asking.asked == before + 1
    assert set(twin.provenance.external) == set(world.provenance.external) == {"1", "2"}
    for each in (world, twin):
        await each.close()


# case E13
async def test_a_session_whose_box_was_killed_raises_at_once_and_keeps_what_it_knows():
    provider = KitProvider()
    world = await begun(provider)
    first = await world.step(say("a"), "0")
    await world.kill_box()
    assert not provider.live
    commands = len(provider.commands)
    for act in (lambda: world.step(say("b"), "1"), world.snapshot, world.kill_box):
        with pytest.raises(SandboxDied, match="box-1 was killed"):
            await act()
    assert len(provider.commands) == commands
    assert await world.step(say("a"), "0") == first  # P25
    await world.reset(TASK, 0)
    assert (await world.step(say("a"), "0")).messages
    await world.close()


async def test_the_record_names_the_last_box_and_the_image():
    world = made(KitProvider())
    assert (world.provenance.sandbox_id, world.provenance.image_digest) == ("", "sha256:kit")
    await world.reset(TASK, 0)
    await world.reset(TASK, 0)
    await world.close()
    assert (world.provenance.sandbox_id, world.provenance.image_digest) == ("box-2", "sha256:kit")
    with ThreadPoolExecutor(1) as executor:
        assert as_async(world, executor).provenance == world.provenance


# --- lookup -----------------------------------------------------------------------------------------------------------

HOSTILE = ("../store/k07", "store", "k07; ls", "$(cat store/*)", "*", "", ".", "..", "a'b", "-n", "\0", "ä")


# case X5
async def test_lookup_with_files_says_and_is_the_same_whatever_is_asked():
    plain, provider = LookupEnvironment(), KitProvider()
    boxed = made(provider, SandboxedLookup)
    assert await boxed.reset(LOOKUP, 1) == await plain.reset(LOOKUP, 1)
    assert (boxed.name, boxed.version) == ("lookup", "1-sandbox")
    messages = [get(FIRST), get(SECOND), get(FIRST, "put"), get(7), get(None), get("k" * 300), get(f"{FIRST} {SECOND}")]
    messages += [get(f"{FIRST} store/{SECOND}"), get(f"../store/{FIRST}"), get(f"./{FIRST}"), get(f"{FIRST}/")]
    for number, message in enumerate(messages):
        assert await boxed.step(message, str(number)) == await plain.step(message, str(number))
    for key in HOSTILE:
        result = await boxed.step(get(key), f"hostile {key!r}")
        assert result.messages[0].content == "?" and result.status is Status.MODEL_INVALID_ACTION
    assert all(len(command) == 2 and command[1].startswith("store/") for command in provider.commands), "one file each"
    answer = say(LOOKUP.data["answer"])
    await boxed.close()
    boxed = await begun(provider, SandboxedLookup, LOOKUP, 1)
    await plain.reset(LOOKUP, 1)
    assert await boxed.step(answer, "0") == await plain.step(answer, "0")
    await boxed.close()


@pytest.mark.parametrize(
    ("result", "transient", "told"),
    [
        (CommandResult(127, "cat: command not found"), False, "exit code 127: cat: command not found"),
        (CommandResult(None, "", limit="time"), True, "stopped by its limit of time"),
    ],
)
async def test_a_store_that_cannot_be_read_is_no_mistake_of_the_model(result, transient, told):
    provider = KitProvider()
    world = await begun(provider, SandboxedLookup, LOOKUP)
    provider.answers["cat"] = result
    with pytest.raises(EnvironmentFault, match=told) as caught:
        await world.step(get(FIRST), "0")
    assert caught.value.transient is transient
    await world.close()


@pytest.mark.parametrize("hops", [1, 2, 5])
async def test_lookup_shows_how_it_is_played(hops):
    task = lookup_task(hops=(hops,))
    world = await begun(KitProvider(), SandboxedLookup, task)
    shown = SandboxedLookup.demonstrate(task)
    results = [await world.step(message, str(number)) for number, message in enumerate(shown)]
    assert [result.terminated for result in results] == [False] * hops + [True]
    assert results[-1].rewards[0].value == 1.0
    await world.close()

"""Who looks after boxes: one that takes long, or holds up its files, is its own affair and nobody else's."""

import asyncio

import pytest

from headrace.actors.sandboxes.docker_sizes import Sizes
from headrace.actors.sandboxes.provider import LOOK_S, Box, BoxProvider, pause_s
from headrace.actors.sandboxes.shell import Shell, ShellState
from headrace.platform.config.sandbox import SandboxConfig
from headrace.platform.contracts import BoxLimits
from headrace.platform.errors import SandboxDied

PATIENCE_S = 5.0
OVER = "it was over its disk of 1 MiB"


class NoChannel:
    """The way to a shell that is never asked for anything."""

    def cause(self):
        return "its shell ended"


class HeldBox(Box):
    """A box whose looks and files wait until they are let go, and that counts them."""

    workspace = "/workspace"

    def __init__(self, number):
        super().__init__(f"held-{number}", Shell(NoChannel(), BoxLimits(), ShellState(b"/", b"")), BoxLimits())
        self.look_ends, self.file_ends, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.looks = self.reading = 0
        self.over = ""

    async def _over(self):
        self.looks += 1
        await self.look_ends.wait()
        return self.over

    async def _read(self, path, limit):
        self.reading += 1
        await self.file_ends.wait()
        return b"read"

    async def _write(self, path, data, limit):
        await self.file_ends.wait()

    async def _keep(self, state):
        return "kept"

    def _kill(self, why):
        self.ended.set()

    async def _end(self):
        self.ended.set()


class HeldProvider(BoxProvider):
    """Makes such boxes; its looks for leftovers never end."""

    mode = "held"

    def __init__(self, state):
        super().__init__(SandboxConfig(), state)

    async def reap(self):
        await asyncio.Event().wait()

    async def _start(self, number, snapshot):
        return HeldBox(number)

    async def _forget(self, snapshot):
        pass

    async def _release(self):
        pass


@pytest.fixture
async def boxes(tmp_path):
    provider = HeldProvider(tmp_path)
    yield [await provider.create() for _ in range(2)]
    await provider.close()


async def test_a_look_that_takes_long_keeps_no_other_box_from_its_limits(boxes):
    slow, other = boxes
    other.over = OVER
    other.look_ends.set()
    async with asyncio.timeout(PATIENCE_S):
        await other.ended.wait()
    assert other.shell.gone
    assert not slow.shell.gone
    assert slow.looks == 1


async def test_a_box_whose_shell_is_gone_still_has_its_limits(boxes):
    box, _ = boxes
    box.shell.give_up("its shell does not answer")
    box.over = OVER
    box.look_ends.set()
    async with asyncio.timeout(PATIENCE_S):
        await box.ended.wait()


async def test_a_box_that_cannot_be_measured_is_ended(boxes, monkeypatch):
    box, other = boxes
    box._over = failing
    async with asyncio.timeout(PATIENCE_S):
        box.look_ends.set()
        await box.ended.wait()
    assert not other.shell.gone
    with pytest.raises(SandboxDied, match="cannot be measured: too deep"):
        await box.run("true", 1.0)


async def failing():
    raise OSError("too deep")


async def test_a_box_holds_up_its_own_files_only(boxes):
    box, other = boxes
    held = [asyncio.create_task(box.read("a")) for _ in range(20)]
    other.file_ends.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await other.read("a") == b"read"
        assert box.reading < len(held), "they take all threads that there are"
        box.file_ends.set()
        assert await asyncio.gather(*held) == [b"read"] * len(held)


async def test_one_question_serves_all_who_look_meanwhile():
    asked, was_asked, answer = [], asyncio.Event(), asyncio.Event()

    async def ask():
        asked.append(1)
        was_asked.set()
        await answer.wait()
        return {"a": 1, "b": 2}

    sizes = Sizes(ask)
    looks = [asyncio.create_task(sizes.of(name)) for name in ("a", "b", "gone")]
    async with asyncio.timeout(PATIENCE_S):
        await was_asked.wait()
        answer.set()
        assert await asyncio.gather(*looks) == [1, 2, 0]
    assert len(asked) == 1
    assert pause_s(0.01) == LOOK_S
    assert pause_s(3.0) == 12.0


async def test_a_daemon_that_refuses_leaves_what_it_said_before():
    answers = [{"a": 1}, SandboxDied("no daemon")]

    async def ask():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    sizes = Sizes(ask)
    assert await sizes.of("a") == 1
    async with asyncio.timeout(PATIENCE_S):
        while answers:
            assert await sizes.of("a") == 1
            await asyncio.sleep(0.01)
    assert await sizes.of("a") == 1

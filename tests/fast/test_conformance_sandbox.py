import msgspec
import pytest

from headrace.platform.contracts import CommandResult
from headrace.platform.errors import SandboxDied
from headrace.platform.testing.conformance.sandbox import SANDBOX_SUITE
from headrace.platform.testing.conformance.support import run_suite
from headrace.platform.testing.fakes.sandbox import MemorySandbox, MemorySandboxProvider


@pytest.mark.parametrize("name", SANDBOX_SUITE)
async def test_the_fake_conforms(name):
    await SANDBOX_SUITE[name](MemorySandboxProvider)


async def test_the_fake_says_that_it_isolates_nothing_and_counts_its_boxes():
    provider = MemorySandboxProvider()
    assert "no isolation" in provider.mode
    box = await provider.create()
    assert provider.live == {box.sandbox_id}
    await box.close()
    assert provider.live == set()
    killed = await provider.create()
    killed.kill()
    with pytest.raises(SandboxDied, match="it was killed"):
        await killed.run("true", 1.0)


async def test_a_box_of_the_fake_begins_with_the_files_given():
    box = await MemorySandboxProvider({"a.txt": b"a"}).create()
    assert await box.read("a.txt") == b"a"
    assert (await box.run("ls", 1.0)).output == "a.txt\n"
    assert (await box.run("pwd", 1.0)).output == "/workspace\n"


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("", CommandResult(0, "")),
        ("echo a  'b c'", CommandResult(0, "a b c\n")),
        ("cat nowhere", CommandResult(1, "cat: nowhere: no such file\n")),
        ("rm nowhere", CommandResult(1, "rm: nowhere: no such file\n")),
        ("sleep 2", CommandResult(0, "", seconds=2)),
        ("sleep soon", CommandResult(1, "sleep: invalid time interval 'soon'\n")),
        ("python", CommandResult(127, "python: command not found\n")),
    ],
)
async def test_the_commands_of_the_fake(command, result):
    box = await MemorySandboxProvider().create()
    assert await box.run(command, 5.0) == result


class Provider(MemorySandboxProvider):
    """Boxes of a class that has a fault."""

    box = MemorySandbox

    def _open(self, files):
        opened = super()._open(files)
        opened.__class__ = self.box
        return opened


class RaisesOnTimeout(MemorySandbox):
    async def run(self, command, timeout_s, silence_s=None):
        if command.startswith("sleep"):
            raise TimeoutError(command)
        return await super().run(command, timeout_s, silence_s)


class OneLimit(MemorySandbox):
    async def run(self, command, timeout_s, silence_s=None):
        return await super().run(command, timeout_s)


class Crashes(MemorySandbox):
    async def run(self, command, timeout_s, silence_s=None):
        result = await super().run(command, timeout_s, silence_s)
        if "\ufffd" in result.output:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return result


class NeverCloses(MemorySandbox):
    async def close(self):
        self._provider.live.discard(self.sandbox_id)


class HidesExitCodes(MemorySandbox):
    async def run(self, command, timeout_s, silence_s=None):
        return msgspec.structs.replace(await super().run(command, timeout_s, silence_s), exit_code=0)


class ReturnsNothing(MemorySandbox):
    async def read(self, path):
        return await super().read(path) if path == "data.bin" or path[-8:] == "made.txt" else b""


class Forgetful(MemorySandbox):
    async def run(self, command, timeout_s, silence_s=None):
        self._world.directory, self._world.variables = "/workspace", {}
        return await super().run(command, timeout_s, silence_s)


@pytest.mark.parametrize(
    ("box", "check", "message"),
    [
        (RaisesOnTimeout, "time_outs_are_results", "TimeoutError"),
        (Crashes, "invalid_utf8_is_replaced", "UnicodeDecodeError"),
        (NeverCloses, "close_is_final_and_safe_twice", "a closed box ran a command"),
        (HidesExitCodes, "commands_run", "false gave"),
        (HidesExitCodes, "a_command_that_does_not_parse_is_an_ordinary_error", "unclosed quote"),
        (ReturnsNothing, "files_are_bytes", "not FileNotFoundError"),
        (OneLimit, "time_outs_are_results", "a silent command gave"),
        (Forgetful, "directory_and_variables_last", "cat a.txt gave"),
        (Forgetful, "snapshots_keep_files", "cat a.txt gave"),
    ],
)
async def test_the_suite_finds_what_is_wrong(box, check, message):
    make = type("Broken", (Provider,), {"box": box})
    with pytest.raises(AssertionError, match=rf"{check}: .*{message}"):
        await run_suite({check: SANDBOX_SUITE[check]}, make)


class SharedFiles(MemorySandboxProvider):
    def _open(self, files):
        opened = super()._open(files)
        opened._world = self.__dict__.setdefault("shared", opened._world)
        return opened


@pytest.mark.parametrize("check", ["boxes_share_nothing", "snapshots_keep_files"])
async def test_shared_files_are_found(check):
    with pytest.raises(AssertionError, match=check):
        await run_suite({check: SANDBOX_SUITE[check]}, SharedFiles)

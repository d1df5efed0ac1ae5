"""The boxed tools, in a real box and behind the real gateway: `shell`, `files` and `python` mounted beside a world."""

import pytest

from headrace.actors.worlds import Worlds
from headrace.platform.config import EnvironmentConfig
from headrace.platform.records.message import Message, ToolCall
from headrace.platform.records.status import Role, SideEffectTier, Status

KEY = "run.t0.0.0/0"


@pytest.fixture
async def opened():
    """Makes a session of `lookup` with all boxed tools; every one is closed after the test."""
    made = []

    async def make(**more):
        given = {"name": "lookup", "sandbox": "bubblewrap", "tools": ["shell", "files", "python"], **more}
        config = EnvironmentConfig.model_validate(given)
        worlds = Worlds((config,), "train", 0)
        setting = worlds.setting(0)
        session = worlds.session(setting)
        made.append((worlds, session))
        await session.reset(setting.task, setting.seed)
        return session

    yield make
    for worlds, session in made:
        await session.close()
        await worlds.resources.close()


def says(*calls):
    made = tuple(ToolCall(name, arguments, f"c{n}") for n, (name, arguments) in enumerate(calls))
    return Message(Role.ASSISTANT, tool_calls=made)


async def told(session, turn, *calls):
    result = await session.step(says(*calls), f"{KEY}/{turn}")
    return [message.content for message in result.messages], result


async def test_files_are_written_searched_edited_read_and_run(opened):
    session = await opened()
    assert [tool.name for tool in session.tools()] == [
        "get", "shell", "read_file", "search_files", "write_file", "edit_file", "python",
    ]  # fmt: skip
    program = "import sys\nprint(6 * 7)\n"
    said, result = await told(session, 0, ("write_file", {"path": "a/p.py", "content": program}))
    assert said == ["wrote a/p.py: 2 lines"] and result.calls[0].tier is SideEffectTier.WRITE
    said, _ = await told(session, 1, ("search_files", {"pattern": r"6 \* [0-9]"}), ("read_file", {"path": "a/p.py"}))
    assert said == ["./a/p.py:2:print(6 * 7)", "1\timport sys\n2\tprint(6 * 7)"]
    said, _ = await told(session, 2, ("edit_file", {"path": "a/p.py", "old": "6 * 7", "new": "'edited'"}))
    assert said == ["edited a/p.py"]
    said, _ = await told(
        session, 3, ("shell", {"command": "cd a && python3 p.py; exit_code() { return 3; }; exit_code"})
    )
    assert said == ["edited\n[exit code 3]"]
    said, _ = await told(
        session, 4, ("shell", {"command": "pwd | sed 's:.*/::'"}), ("python", {"code": "print(1 + 1)"})
    )
    assert said == ["a", "2"], "the shell stays where it went"


async def test_what_cannot_be_done_is_told(opened):
    session = await opened()
    said, result = await told(
        session,
        0,
        ("read_file", {"path": "none.txt"}),
        ("edit_file", {"path": "none.txt", "old": "a", "new": "b"}),
        ("python", {"code": "raise SystemExit(2)"}),
        ("shell", {"command": "sleep 9", "timeout_s": 0.3}),
    )
    assert (
        said[:3] == ["there is no file none.txt", "there is no file none.txt", "[no output]\n[exit code 2]"] or said[2]
    )
    assert "[exit code 2]" in said[2] and "limit of time" in said[3]  # P27: an observation
    assert result.status is Status.OK


async def test_all_commands_of_a_turn_fit_into_its_step(opened):  # P27
    session = await opened(step_deadline_s=3.0)
    said, result = await told(session, 0, *[("shell", {"command": "sleep 9"})] * 4)
    assert "limit of time" in said[0] and said[-1].startswith("[not done:")
    assert result.status is Status.OK


async def test_a_program_has_a_file_and_where_it_cannot_that_is_told(opened):
    session = await opened()
    said, _ = await told(session, 0, ("shell", {"command": "mkdir /tmp/.program.py"}))
    said, _ = await told(session, 1, ("python", {"code": "print(1)"}))
    assert said[0].startswith("the program cannot be written")


async def test_paths_begin_at_the_workspace_wherever_the_shell_has_gone(opened):
    session = await opened()
    await told(session, 0, ("write_file", {"path": "f", "content": "here"}))
    await told(session, 1, ("shell", {"command": "mkdir d && cd d && echo there > f"}))
    said, _ = await told(session, 2, ("read_file", {"path": "f"}), ("search_files", {"pattern": "here", "path": "f"}))
    assert said == ["1\there", "f:1:here"]


async def test_rules_see_paths_and_commands_of_boxed_tools(opened):
    permissions = {"commands": {"allow": ["ls"]}, "grants": ["read", "write"]}
    session = await opened(permissions=permissions)
    said, result = await told(
        session,
        0,
        ("read_file", {"path": "../../etc/passwd"}),
        ("shell", {"command": "ls; touch /tmp/made"}),
        ("shell", {"command": "ls /tmp"}),
    )
    assert [outcome.rule for outcome in result.calls] == ["rules:path", "rules:command", ""]
    assert said[0].startswith("blocked:") and "made" not in said[2]


async def test_writes_are_part_of_the_state(opened):
    session = await opened()
    _, first = await told(session, 0, ("write_file", {"path": "a", "content": "1"}))
    _, second = await told(session, 1, ("write_file", {"path": "a", "content": "2"}))
    assert len({first.state_hash, second.state_hash}) == 2
    assert first.cost.tool_calls == 1

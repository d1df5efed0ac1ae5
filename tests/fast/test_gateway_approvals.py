"""Who is asked about what cannot be undone: nobody, a function, or a person at `headrace approvals`."""

import asyncio
import json
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from headrace.actors.gateway.decisions import approval_queue
from headrace.actors.gateway.decisions.approvals import Approvals
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.policy import Policy
from headrace.platform.errors import ConfigError, NotFound
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier
from headrace.platform.store.run_root import RunRoot
from tests.command_line import call_main

SEND = ToolSpec("send", capability=Capability.NETWORK, tier=SideEffectTier.IRREVERSIBLE)
DEADLINE_S = 30.0


def state_of(approvals, within_s=DEADLINE_S, scope="e1/0#ab"):
    return EpisodeState(scope, Policy(approvals=approvals, approval_s=within_s), {}, frozenset(), (), 0.0)


def asked_of(key="e1/0/3/0", **arguments):
    return Asked(ToolCall("send", arguments), SEND, key, here=False, taint=("tool:get",))


@pytest.fixture
def home(tmp_path):
    return tmp_path / "run" / "gateway"


async def test_by_default_nobody_is_asked(home):
    denial = await Approvals(home).decide(asked_of(), state_of("deny"))
    assert (denial.rule, denial.invalid) == ("tier:approval_denied", False)
    assert not home.exists()


# --- a function -------------------------------------------------------------------------------------------------------

FUNCTIONS = """
import threading
seen, never = [], threading.Event()

def approve(tool, arguments, episode):
    seen.append((tool, dict(arguments), episode, threading.current_thread().name))
    arguments["to"] = "somebody else"
    return True

def refuse(tool, arguments, episode):
    return False

def vague(tool, arguments, episode):
    return "yes"

def fails(tool, arguments, episode):
    raise LookupError("no such thing")

def late(tool, arguments, episode):
    raise TimeoutError("its own")

def hangs(tool, arguments, episode):
    return never.wait()

async def slow(tool, arguments, episode):
    return True
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "approving.py"
    path.write_text(FUNCTIONS)
    return path


async def test_a_function_approves_in_a_thread_of_its_own(home, file):
    approvals, asked = Approvals(home), asked_of(to="a@example.org")
    assert await approvals.decide(asked, state_of(f"{file}:approve")) is None
    assert await approvals.decide(asked, state_of(f"{file}:approve")) is None
    assert asked.call.arguments == {"to": "a@example.org"}  # what it was shown is what is sent
    seen = approvals._functions._loaded[f"{file}:approve"].__globals__["seen"]
    assert [each[:3] for each in seen] == [("send", {"to": "a@example.org"}, "e1/0")] * 2
    assert threading.current_thread().name not in {each[3] for each in seen}


@pytest.mark.parametrize("name", ["refuse", "vague"])
async def test_all_but_true_is_a_no(home, file, name):
    denial = await Approvals(home).decide(asked_of(), state_of(f"{file}:{name}"))
    assert denial.rule == "tier:approval_denied"


async def test_a_function_that_fails_has_not_decided(home, file):
    with pytest.raises(LookupError, match="no such thing"):
        await Approvals(home).decide(asked_of(), state_of(f"{file}:fails"))
    with pytest.raises(RuntimeError, match="TimeoutError: its own"):
        await Approvals(home).decide(asked_of(), state_of(f"{file}:late"))


async def test_a_function_that_does_not_answer_is_a_no_and_holds_up_nothing(home, file):
    approvals = Approvals(home)
    hanging = asyncio.create_task(approvals.decide(asked_of(), state_of(f"{file}:hangs", within_s=2.0)))
    assert await approvals.decide(asked_of(), state_of(f"{file}:approve")) is None
    assert (await hanging).rule == "tier:approval_timeout"
    approvals._functions._loaded[f"{file}:hangs"].__globals__["never"].set()


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("ask", "write deny, queue or ./file.py:name"),
        ("{file}:nothing", "has no 'nothing'"),
        ("{file}:slow", "must be a plain function"),
        ("./missing.py:approve", "there is no file"),
    ],
)
async def test_a_function_that_is_none_is_the_recipes_fault(home, file, target, told):
    with pytest.raises(ConfigError, match=told):
        await Approvals(home).decide(asked_of(), state_of(target.format(file=file)))


# --- a person ---------------------------------------------------------------------------------------------------------


async def waiting(folder, count=1):
    """The questions that wait, once there are so many."""
    async with asyncio.timeout(DEADLINE_S):
        while len(found := approval_queue.questions(folder, time.time())) < count:  # noqa: ASYNC110 - threads write them
            await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize(("granted", "rule"), [(True, None), (False, "tier:approval_denied")])
async def test_a_person_is_shown_the_call_and_decides(home, granted, rule):
    asking = asyncio.create_task(Approvals(home).decide(asked_of(to="a"), state_of("queue")))
    (question,) = await waiting(home / "approvals")
    assert (question.tool, question.arguments, question.key) == ("send", {"to": "a"}, "e1/0/3/0")
    assert (question.scope, question.taint) == ("e1/0#ab", ("tool:get",))
    files = list((home / "approvals").iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]
    approval_queue.reply(home / "approvals", question.question_id[:6], granted, time.time())
    denial = await asking
    assert (denial and denial.rule) == rule
    assert list((home / "approvals").iterdir()) == []  # an answer is used once


async def test_nobodys_answer_is_a_no_in_time(home):
    denial = await Approvals(home).decide(asked_of(), state_of("queue", within_s=0.3))
    assert denial.rule == "tier:approval_timeout"
    assert list((home / "approvals").iterdir()) == []


async def test_who_gives_up_waiting_leaves_no_question(home):
    asking = asyncio.create_task(Approvals(home).decide(asked_of(), state_of("queue")))
    await waiting(home / "approvals")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert list((home / "approvals").iterdir()) == []


async def test_who_gives_up_while_it_is_written_leaves_no_question(home, monkeypatch):
    written, go = threading.Event(), threading.Event()
    write = approval_queue.Asking.write

    def slow(asking):
        written.set()
        go.wait(DEADLINE_S)
        write(asking)

    monkeypatch.setattr(approval_queue.Asking, "write", slow)
    asking = asyncio.create_task(Approvals(home).decide(asked_of(), state_of("queue")))
    await asyncio.to_thread(written.wait, DEADLINE_S)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not (home / "approvals").exists()


ASKS = """
import sys, time
from pathlib import Path
import msgspec
from headrace.actors.gateway.decisions import approval_queue
asking = approval_queue.Asking(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=approval_queue.Question))
asking.write()
print("asked", flush=True)
time.sleep(600)
"""


async def test_a_question_of_a_process_that_was_killed_is_not_shown_and_not_answered(home):
    folder, asked = home / "approvals", question()
    text = msgspec.json.encode(asked).decode()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ASKS, folder, text, stdout=subprocess.PIPE)
    assert await process.stdout.readline() == b"asked\n"
    assert approval_queue.questions(folder, time.time()) == [asked]
    process.kill()
    await process.wait()
    assert (folder / f"{asked.question_id}.json").exists() and approval_queue.questions(folder, time.time()) == []
    with pytest.raises(NotFound, match="fits 0"):
        approval_queue.reply(folder, asked.question_id, True, time.time())
    denial = await Approvals(home).decide(asked_of(), state_of("queue", within_s=0.3))  # the next process
    assert denial.rule == "tier:approval_timeout" and list(folder.iterdir()) == []


async def test_a_question_that_is_over_before_it_is_answered_cannot_be(home, monkeypatch):
    folder, asked = home / "approvals", question()
    asking, find = approval_queue.Asking(folder, asked), approval_queue.questions
    asking.write()

    def found_just_before_its_end(*args):
        found = find(*args)
        asking.end()
        return found

    monkeypatch.setattr(approval_queue, "questions", found_just_before_its_end)
    with pytest.raises(NotFound, match="does not wait any more"):
        approval_queue.reply(folder, asked.question_id, True, time.time())
    assert list(folder.iterdir()) == []


async def granted_answer(home, **arguments):
    """The bytes of a real yes to a call, which was decided by it."""
    asking = asyncio.create_task(Approvals(home).decide(asked_of(**arguments), state_of("queue")))
    (question,) = await waiting(home / "approvals")
    approval_queue.reply(home / "approvals", question.question_id, True, time.time())
    said = (home / "approvals" / f"{question.question_id}.answer").read_bytes()
    assert await asking is None
    return question, said


# Replayed approvals.
@pytest.mark.parametrize("renamed", [False, True])
async def test_a_yes_to_another_call_is_a_no(home, renamed):
    _, said = await granted_answer(home, to="a")
    asking = asyncio.create_task(Approvals(home).decide(asked_of(to="b"), state_of("queue")))
    (question,) = await waiting(home / "approvals")
    if renamed:
        said = msgspec.json.encode({**msgspec.json.decode(said), "question_id": question.question_id})
    path = home / "approvals" / f"{question.question_id}.answer"
    path.write_bytes(said)
    path.chmod(0o600)
    assert (await asking).rule == "tier:approval_denied"


@pytest.mark.parametrize("field", ["scope", "key", "arguments_hash"])
async def test_a_yes_counts_for_scope_key_and_arguments_together(home, field):
    asking = asyncio.create_task(Approvals(home).decide(asked_of(to="a"), state_of("queue")))
    (question,) = await waiting(home / "approvals")
    right = {name: getattr(question, name) for name in ("question_id", "scope", "key", "arguments_hash")}
    path = home / "approvals" / f"{question.question_id}.answer"
    path.write_text(json.dumps({**right, "granted": True, "by": "me", field: "another"}))
    path.chmod(0o600)
    assert (await asking).rule == "tier:approval_denied"


async def test_an_old_answer_says_nothing_about_the_same_call_made_again(home):
    old, said = await granted_answer(home, to="a")
    (home / "approvals" / f"{old.question_id}.answer").write_bytes(said)
    denial = await Approvals(home).decide(asked_of(to="a"), state_of("queue", within_s=0.3))
    assert denial.rule == "tier:approval_timeout"
    assert list((home / "approvals").iterdir()) == []  # what a process that is gone has left is removed


async def test_what_is_shown_is_what_is_approved(home):
    asking = asyncio.create_task(Approvals(home).decide(asked_of(to="evil"), state_of("queue")))
    (question,) = await waiting(home / "approvals")
    path = home / "approvals" / f"{question.question_id}.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(question, arguments={"to": "harmless"})))
    approval_queue.reply(home / "approvals", question.question_id, True, time.time())
    assert (await asking).rule == "tier:approval_denied"


@pytest.mark.parametrize("how", ["torn", "link", "writable"])
async def test_an_answer_is_a_file_that_nobody_else_could_have_written(home, how, tmp_path):
    asking = asyncio.create_task(Approvals(home).decide(asked_of(), state_of("queue")))
    (question,) = await waiting(home / "approvals")
    answer = home / "approvals" / f"{question.question_id}.answer"
    with asked_in(tmp_path / "copy", question):
        approval_queue.reply(tmp_path / "copy", question.question_id, True, time.time())
        said = (tmp_path / "copy" / answer.name).read_bytes()
    if how == "torn":
        answer.write_bytes(said[:20])
    elif how == "writable":
        (tmp_path / "elsewhere").write_bytes(said)
        (tmp_path / "elsewhere").chmod(0o666)
        (tmp_path / "elsewhere").replace(answer)
    else:
        (tmp_path / "elsewhere").write_bytes(said)
        answer.symlink_to(tmp_path / "elsewhere")
    assert (await asking).rule == "tier:approval_denied"


async def test_several_calls_wait_beside_each_other(home):
    approvals = Approvals(home)
    asking = [
        asyncio.create_task(approvals.decide(asked_of(key=f"e{n}/0/1/0", n=n), state_of("queue", scope=f"e{n}/0#x")))
        for n in range(5)
    ]
    for question in await waiting(home / "approvals", 5):
        approval_queue.reply(home / "approvals", question.question_id, question.arguments["n"] % 2 == 0, time.time())
    assert [denial is None for denial in await asyncio.gather(*asking)] == [True, False, True, False, True]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return RunRoot.create("runs", "a-run", "run: {}\n").local("gateway") / "approvals"


@pytest.fixture
def ask(run):
    with ExitStack() as asked:
        yield lambda question: asked.enter_context(asked_in(run, question))


@contextmanager
def asked_in(folder, question):
    """Somebody waits on a question meanwhile."""
    asking = approval_queue.Asking(folder, question)
    asking.write()
    try:
        yield
    finally:
        asking.end()


def question(question_id="0123456789abcdef", left_s=60.0, **arguments):
    now = time.time()
    return approval_queue.Question(
        question_id, "send", arguments, "e1/0#ab", "e1/0/3/0", ("tool:get",), now, now + left_s
    )


def test_the_command_shows_what_waits(run, ask, monkeypatch, capsys):
    assert call_main(monkeypatch, "approvals", "a-run") == 0
    assert capsys.readouterr().out == "no call waits to be approved\n"
    ask(question(text="\x1b[2Jhello\n" + "x" * 1000))
    ask(question("fedcba9876543210", left_s=-1.0))
    assert call_main(monkeypatch, "approvals", "a-") == 0
    shown = capsys.readouterr().out
    assert shown.startswith('0123456789abcdef  send {"text": "\\u001b[2Jhello\\n')
    assert "episode e1/0, " in shown and "arguments derived from tool:get" in shown
    assert "\x1b" not in shown and "fedcba" not in shown and len(shown) < 700


def test_the_command_answers_in_json(run, ask, monkeypatch, capsys):
    ask(asked := question(to="a"))
    assert call_main(monkeypatch, "approvals", "a-run", "--json") == 0
    (facts,) = json.loads(capsys.readouterr().out)["waiting"]
    assert (facts["id"], facts["arguments"], facts["episode"]) == (asked.question_id, {"to": "a"}, "e1/0")
    assert facts["arguments_hash"] == asked.arguments_hash
    assert call_main(monkeypatch, "approvals", "a-run", "--grant", "0123", "--json") == 0
    assert json.loads(capsys.readouterr().out)["answer"] == "granted"
    assert approval_queue.answer_to(run, asked) is True


def test_the_command_denies(run, ask, monkeypatch, capsys):
    ask(asked := question(to="a"))
    assert approval_queue.answer_to(run, asked) is None
    assert call_main(monkeypatch, "approvals", "a-run", "--deny", "0123") == 0
    assert capsys.readouterr().out == 'denied: send {"to": "a"}\n'
    assert approval_queue.answer_to(run, asked) is False


def test_the_command_answers_only_what_waits(run, ask, monkeypatch, capsys):
    ask(question("fedcba9876543210", left_s=-1.0))
    for given in ("fedc", "0123"):
        assert call_main(monkeypatch, "approvals", "a-run", "--grant", given) == 2
        assert "fits 0 of the calls that wait: none" in capsys.readouterr().err
    assert call_main(monkeypatch, "approvals", "a-run", "--grant", "a", "--deny", "a") == 2
    assert call_main(monkeypatch, "approvals", "nothing") == 2
    with pytest.raises(NotFound):
        approval_queue.reply(run, "", True, time.time())

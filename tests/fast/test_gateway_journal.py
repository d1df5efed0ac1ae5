"""The journal: the same key gives the same answer, after a crash too (P25); a scope is forgotten as a whole (P26)."""

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.actors.gateway.journal import UNCLAIMED_S, Journal, Known
from headrace.platform.contracts import CallVerdict, ToolResult
from headrace.platform.records.status import SideEffectTier

LONG_S = 60.0
SCOPE, KEY, CALLS = "run.t0.0.0/main#6a", "run.t0.0.0/main/0", b"calls"
WRITES = (CallVerdict(tier=SideEffectTier.WRITE, taint=("tool:http https://example.org",)),)
DONE = (ToolResult("written", source="tool:files"),)


def performed(text: str) -> tuple[CallVerdict, ...]:
    """The verdict on a call that the gateway performed."""
    return (CallVerdict(ToolResult(text), SideEffectTier.WRITE, lasting=True),)


async def opened(home: Path, **changes: object) -> Journal:
    return Journal(home, LONG_S, **changes)


def files(home: Path) -> list[Path]:
    return sorted((home / "journal").iterdir())


class TestAKey:
    def test_goes_from_intent_to_settled(self, tmp_path):
        journal = Journal(tmp_path)
        assert journal.known(SCOPE, KEY) is None
        journal.intent(SCOPE, KEY, CALLS)
        assert journal.known(SCOPE, KEY) == Known(CALLS, "intent")
        journal.decided(SCOPE, KEY, CALLS, WRITES, effects=True)
        assert journal.known(SCOPE, KEY) == Known(CALLS, "decided", WRITES)
        journal.settled(SCOPE, KEY, DONE)
        assert journal.known(SCOPE, KEY) == Known(CALLS, "settled", WRITES, DONE)
        assert journal.known(SCOPE, "other") is None and journal.known("other", KEY) is None
        journal.close()

    @pytest.mark.parametrize("effects", [False, True])
    def test_belongs_to_its_calls(self, effects, tmp_path):
        journal = Journal(tmp_path)
        journal.decided(SCOPE, KEY, CALLS, WRITES, effects)
        with pytest.raises(ValueError, match="other calls"):  # P25: same key, another body
            journal.decided(SCOPE, KEY, b"others", WRITES, effects)
        with pytest.raises(ValueError, match="other calls"):
            journal.intent(SCOPE, KEY, b"others")
        assert journal.known(SCOPE, KEY) == Known(CALLS, "decided", WRITES)
        journal.intent("another scope", KEY, b"others")  # P26
        journal.close()

    def test_is_not_settled_before_it_is_decided(self, tmp_path):
        journal = Journal(tmp_path)
        with pytest.raises(KeyError):
            journal.settled(SCOPE, KEY, DONE)
        journal.close()

    def test_is_forgotten_with_its_scope(self, tmp_path):
        journal = Journal(tmp_path)
        journal.decided(SCOPE, KEY, CALLS, performed("x"), effects=True)
        journal.forget(SCOPE)
        journal.forget(SCOPE)
        assert journal.known(SCOPE, KEY) is None and journal.scopes == ()
        journal.intent(SCOPE, KEY, b"others")
        journal.close()


class TestAfterACrash:
    """What is on disk is copied to another home, as a killed process leaves it."""

    async def crashed(self, journal: Journal, home: Path) -> Journal:
        await journal.durable()
        after = home.with_name(f"{home.name}-after")
        shutil.copytree(home, after)
        journal.close()
        return Journal(after, LONG_S)

    async def test_an_intent_without_a_result_is_known(self, tmp_path):
        journal = await opened(tmp_path / "home")
        journal.intent(SCOPE, KEY, CALLS)
        after = await self.crashed(journal, tmp_path / "home")
        assert after.known(SCOPE, KEY) == Known(CALLS, "intent")  # P25: in doubt
        after.close()

    async def test_answers_of_turns_with_effects_are_known(self, tmp_path):
        journal = await opened(tmp_path / "home")
        journal.intent(SCOPE, "a", CALLS)
        journal.decided(SCOPE, "a", CALLS, performed("sent"), effects=True)
        journal.decided(SCOPE, "b", CALLS, WRITES, effects=True)
        journal.settled(SCOPE, "b", DONE)
        after = await self.crashed(journal, tmp_path / "home")
        assert after.known(SCOPE, "a") == Known(CALLS, "decided", performed("sent"))
        assert after.known(SCOPE, "b") == Known(CALLS, "settled", WRITES, DONE)
        with pytest.raises(ValueError, match="other calls"):
            after.decided(SCOPE, "b", b"others", WRITES, effects=True)
        after.close()

    async def test_reads_run_again_on_the_same_calls_only(self, tmp_path):
        journal = await opened(tmp_path / "home")
        journal.decided(SCOPE, KEY, CALLS, (CallVerdict(),), effects=False)
        journal.settled(SCOPE, KEY, DONE)
        after = await self.crashed(journal, tmp_path / "home")
        assert after.known(SCOPE, KEY) == Known(CALLS, "decided", again=True)
        with pytest.raises(ValueError, match="other calls"):
            after.decided(SCOPE, KEY, b"others", (CallVerdict(),), effects=False)
        after.decided(SCOPE, KEY, CALLS, (CallVerdict(),), effects=False)
        assert after.known(SCOPE, KEY) == Known(CALLS, "decided", (CallVerdict(),))
        after.close()

    async def test_results_of_reads_are_not_on_disk(self, tmp_path):
        journal = await opened(tmp_path)
        journal.decided(SCOPE, KEY, CALLS, (CallVerdict(ToolResult("pagetext")),), effects=False)
        journal.settled(SCOPE, KEY, (ToolResult("filetext"),))
        await journal.durable()
        (file,) = files(tmp_path)
        assert b"text" not in file.read_bytes() and file.stat().st_mode & 0o777 == 0o600
        journal.close()

    async def test_what_was_forgotten_stays_so(self, tmp_path):
        journal = await opened(tmp_path / "home")
        journal.intent(SCOPE, KEY, CALLS)
        journal.intent("kept", KEY, CALLS)
        journal.forget(SCOPE)
        after = await self.crashed(journal, tmp_path / "home")
        assert after.scopes == ("kept",)
        after.close()

    async def test_what_nobody_asks_for_goes_in_time(self, tmp_path):
        journal = await opened(tmp_path)
        for scope in ("left", "asked for", "left too"):
            journal.intent(scope, KEY, CALLS)
        journal.close()
        clock = [0.0]
        after = await opened(tmp_path, now=lambda: clock[0])
        assert after.known("asked for", KEY) is not None
        clock[0] = UNCLAIMED_S + 1
        for number in range(3):
            after.intent("new", str(number), CALLS)
        assert set(after.scopes) == {"asked for", "new"}
        after.close()

    async def test_a_torn_tail_loses_what_was_torn_alone(self, tmp_path):
        journal = await opened(tmp_path / "home")
        journal.intent(SCOPE, "a", CALLS)
        await journal.durable()
        (file,) = files(tmp_path / "home")
        whole = file.stat().st_size
        journal.intent(SCOPE, "b", CALLS)
        journal.close()
        data = file.read_bytes()
        for kept in range(whole, len(data)):
            home = tmp_path / str(kept)
            (home / "journal").mkdir(parents=True)
            (home / "journal" / file.name).write_bytes(data[:kept])
            after = Journal(home)
            assert after.known(SCOPE, "a") == Known(CALLS, "intent") and after.known(SCOPE, "b") is None
            after.intent(SCOPE, "b", CALLS)
            after.close()
            again = Journal(home)
            assert again.known(SCOPE, "b") == Known(CALLS, "intent")
            again.close()

    async def test_a_failed_disk_fails_closed(self, tmp_path):
        def fails(file: int) -> None:
            raise OSError(errno.EIO, "bad sector")

        journal = await opened(tmp_path, sync=fails)
        journal.intent(SCOPE, KEY, CALLS)
        with pytest.raises(OSError, match="bad sector"):
            await journal.durable()
        with pytest.raises(OSError, match="bad sector"):
            journal.decided(SCOPE, KEY, CALLS, WRITES, effects=True)
        with pytest.raises(OSError, match="bad sector"):
            journal.intent("new", KEY, CALLS)
        assert journal.known("new", KEY) is None and journal.failure is not None
        journal.forget(SCOPE)
        assert journal.scopes == ()
        with pytest.raises(OSError, match="bad sector"):
            journal.close()


class TestBounds:
    async def test_contents_beyond_the_memory_are_read_from_disk_or_run_again(self, tmp_path):
        journal = await opened(tmp_path, memory_bytes=100)
        journal.decided(SCOPE, "write", CALLS, performed("w" * 60), effects=True)
        journal.decided(SCOPE, "read", CALLS, (CallVerdict(ToolResult("r" * 60)),), effects=False)
        await journal.durable()  # what is not on disk is not let go
        journal.decided(SCOPE, "last", CALLS, performed("l" * 90), effects=True)
        assert journal.known(SCOPE, "write") == Known(CALLS, "decided", performed("w" * 60))
        assert journal.known(SCOPE, "read") == Known(CALLS, "decided", again=True)
        assert journal.known(SCOPE, "last") == Known(CALLS, "decided", performed("l" * 90))
        assert journal.memory_bytes == 90
        journal.close()

    async def test_files_do_not_grow_with_what_is_forgotten(self, tmp_path):
        journal = await opened(tmp_path, renew_bytes=10_000)
        journal.decided("long", KEY, CALLS, performed("kept"), effects=True)
        for number in range(500):
            journal.decided(str(number), KEY, CALLS, performed("x" * 200), effects=True)
            journal.forget(str(number))
            if number % 20 == 0:
                await journal.durable()
        assert len(files(tmp_path)) <= 2
        assert sum(file.stat().st_size for file in files(tmp_path)) < 30_000
        assert journal.known("long", KEY) == Known(CALLS, "decided", performed("kept"))
        journal.close()
        after = await opened(tmp_path)
        assert after.known("long", KEY) == Known(CALLS, "decided", performed("kept")) and after.scopes == ("long",)
        after.close()


SCOPES, KEYS = st.sampled_from(["s1", "s2", "s3"]), st.sampled_from(["k1", "k2", "k3"])
SIZES = st.integers(0, 80)
ORDER = ("intent", "decided", "settled")


class Machine(RuleBasedStateMachine):
    """The journal against a dictionary, over restarts and crashes, with files that are renewed all the time."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.model: dict[tuple[str, str], tuple[Known, bool]] = {}
        self.lives = 0
        self.open(self.folder / "home-0")

    def open(self, home: Path) -> None:
        self.home = home
        self.journal = Journal(home, LONG_S, memory_bytes=100, renew_bytes=300, sync=lambda file: None)
        self.on_disk: dict[tuple[str, str], Known] = {}  # of turns with effects

    @rule(scope=SCOPES, key=KEYS)
    def intent(self, scope: str, key: str) -> None:
        if (scope, key) not in self.model:
            self.journal.intent(scope, key, key.encode())
            self.model[scope, key] = (Known(key.encode(), "intent"), True)

    @rule(scope=SCOPES, key=KEYS, size=SIZES, effects=st.booleans())
    def decide(self, scope: str, key: str, size: int, effects: bool) -> None:
        before = self.model.get((scope, key))
        if before is not None and before[0].state == "settled":
            return
        self.journal.decided(scope, key, key.encode(), performed("v" * size), effects)
        effects = effects or (before is not None and before[1])
        self.model[scope, key] = (Known(key.encode(), "decided", performed("v" * size)), effects)

    @rule(scope=SCOPES, key=KEYS, size=SIZES)
    def settle(self, scope: str, key: str, size: int) -> None:
        if (scope, key) in self.model:
            _, effects = self.model[scope, key]
            before = self.journal.known(scope, key)
            results = (ToolResult("r" * size),)
            self.journal.settled(scope, key, results)
            self.model[scope, key] = (Known(key.encode(), "settled", before.verdicts, results, before.again), effects)

    @rule(scope=SCOPES)
    def forget(self, scope: str) -> None:
        self.journal.forget(scope)
        self.model = {place: known for place, known in self.model.items() if place[0] != scope}
        self.on_disk = {place: known for place, known in self.on_disk.items() if place[0] != scope}

    @rule()
    def wait(self) -> None:
        async def wait() -> None:
            await self.journal.durable()

        asyncio.run(wait())
        self.on_disk = {place: known for place, (known, effects) in self.model.items() if effects}

    @rule()
    def crash(self) -> None:
        """Nobody waited: what is newer than the last wait may be lost, what is older may not."""
        self.lives += 1
        home = self.folder / f"home-{self.lives}"
        shutil.copytree(self.home, home)
        self.journal.close()
        before = self.on_disk
        self.open(home)
        places = [(scope, key) for scope in ("s1", "s2", "s3") for key in ("k1", "k2", "k3")]
        found = {place: known for place in places if (known := self.journal.known(*place)) is not None}
        for place, known in before.items():
            assert ORDER.index(found[place].state) >= ORDER.index(known.state) and not found[place].again
        self.model = {place: (known, not known.again) for place, known in found.items()}

    @rule(crash=st.booleans())
    def restart(self, crash: bool) -> None:
        self.lives += 1
        home = self.folder / f"home-{self.lives}"
        if crash:
            self.wait()
            shutil.copytree(self.home, home)
            self.journal.close()
        else:
            self.journal.close()
            self.home.rename(home)
        self.open(home)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "journal"):
            return
        assert set(self.journal.scopes) == {scope for scope, _ in self.model}
        for (scope, key), (expected, effects) in self.model.items():
            known = self.journal.known(scope, key)
            if effects or not known.again:
                assert known == expected
            else:
                assert known.calls_hash == expected.calls_hash and not known.verdicts

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            shutil.rmtree(self.folder)


TestAgainstAModel = Machine.TestCase
TestAgainstAModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_nothing_is_open_after_close(tmp_path):
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    journal = Journal(tmp_path)
    journal.intent(SCOPE, KEY, CALLS)
    journal.close()
    journal.close()
    assert open_files() == before

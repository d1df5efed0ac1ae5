"""The audit chain: one entry after the other, hashes only, and whatever is done to the file afterwards shows."""

import errno
import json
import subprocess
import sys

import pytest

from headrace.actors.gateway.audit.entry import Entry, Head, line_hash
from headrace.actors.gateway.audit.log import AuditLog
from headrace.actors.gateway.audit.verify import read_entries, verify

LONG_S = 60.0
SCOPE = "run.t0.0.0/main#6a"
SECRET = "hunter2"


async def write_chain(folder, entries: int = 5, home=None) -> tuple[AuditLog, list[str]]:
    """A closed log, and the head after each entry, the header's first."""
    log = AuditLog(folder, LONG_S, home)
    await log.durable()
    heads = [log.head]
    for number in range(entries):
        denied = number == 2
        log.append(
            "decision",
            SCOPE,
            f"k/{number}",
            "lookup",
            decision="deny" if denied else "allow",
            rule="capability:network" if denied else "",
            arguments_hash=log.digest({"n": number}),
        )
        await log.durable()
        heads.append(log.head)
    log.close()
    return log, heads


def lines_of(log: AuditLog) -> list[bytes]:
    return log.path.read_bytes().splitlines(keepends=True)


def chained(lines: list[bytes]) -> list[bytes]:
    """The same entries with numbers and hashes made anew: what a clever intruder does."""
    made = [lines[0]]
    for number, line in enumerate(lines[1:], 1):
        entry = json.loads(line) | {"number": number, "previous": line_hash(made[-1][:-1])}
        made.append(json.dumps(entry).encode() + b"\n")
    return made


class TestALog:
    async def test_each_line_holds_the_hash_of_the_line_before(self, tmp_path):
        log, heads = await write_chain(tmp_path)
        lines = lines_of(log)
        entries = list(read_entries(lines))
        assert [entry.number for entry in entries] == [1, 2, 3, 4, 5]
        assert [entry.previous for entry in entries] == [line_hash(line[:-1]) for line in lines[:-1]]
        assert heads == [f"{log.chain}:{number}:{line_hash(line[:-1])}" for number, line in enumerate(lines)]
        assert entries[2].decision == "deny" and entries[2].episode == "run.t0.0.0"

    async def test_a_head_is_only_given_out_for_what_is_on_disk(self, tmp_path):
        log = AuditLog(tmp_path, LONG_S)
        assert log.head == ""
        number = log.append("decision", SCOPE)
        await log.durable(number)
        log.append("decision", SCOPE)
        assert Head.parse(log.head).number == number == 1
        await log.durable()
        assert Head.parse(log.head).number == 2
        log.close()

    async def test_a_failed_disk_fails_closed(self, tmp_path):
        def fails(file: int) -> None:
            raise OSError(errno.EIO, "bad sector")

        log = AuditLog(tmp_path, LONG_S, sync=fails)
        number = log.append("intent", SCOPE)
        with pytest.raises(OSError, match="bad sector"):
            await log.durable(number)
        with pytest.raises(OSError, match="bad sector"):
            log.append("decision", SCOPE)
        assert log.head == "" and log.failure is not None
        with pytest.raises(OSError, match="bad sector"):
            log.close()

    def test_what_is_durable_outlives_a_killed_process(self, tmp_path):
        program = (
            "import asyncio, os, signal, sys\n"
            "from pathlib import Path\n"
            "from headrace.actors.gateway.audit.log import AuditLog\n"
            "async def main():\n"
            "    log = AuditLog(Path(sys.argv[1]), 60.0)\n"
            "    for _ in range(50): number = log.append('intent', 'e/main#1')\n"
            "    await log.durable(number)\n"
            "    print(log.head, flush=True)\n"
            "    for _ in range(50): log.append('decision', 'e/main#1')\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "asyncio.run(main())\n"
        )
        killed = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
        )
        head = killed.stdout.strip()
        assert Head.parse(head).number == 50, killed.stderr
        report = verify(tmp_path, {"e": head})
        assert report.holds and report.chains[0].entries >= 50

    async def test_two_lives_are_two_chains(self, tmp_path):
        (first, heads), (second, others) = await write_chain(tmp_path), await write_chain(tmp_path)
        assert first.chain != second.chain
        report = verify(tmp_path, {"a": heads[-1], "b": others[-1]})
        assert report.holds and len(report.chains) == 2


class TestSecrets:
    async def test_arguments_are_there_as_keyed_hashes_only(self, tmp_path):
        home = tmp_path / "home"
        first, second = (AuditLog(tmp_path / "audit", LONG_S, home) for _ in range(2))
        value = {"password": SECRET, "user": "a"}
        assert first.digest(value) == first.digest(dict(reversed(value.items())))  # canonical
        assert first.digest(value) != second.digest(value)
        assert first.digest(value) != line_hash(json.dumps(value, separators=(",", ":")).encode())
        keys = sorted((home / "salts").iterdir())
        assert [key.name for key in keys] == sorted((first.chain, second.chain))
        assert all(key.stat().st_mode & 0o777 == 0o600 and key.stat().st_size == 64 for key in keys)
        assert not any(key.read_bytes() in first.path.read_bytes() for key in keys)
        for log in (first, second):
            log.close()

    async def test_of_a_source_on_the_web_only_the_host_is_kept(self, tmp_path):
        log = AuditLog(tmp_path, LONG_S)
        source = f"tool:http https://me:{SECRET}@example.org/{SECRET}?token={SECRET}#{SECRET}"
        log.append("decision", SCOPE, taint=(source, "tool:lookup"))
        log.close()
        (entry,) = read_entries(lines_of(log))
        assert entry.taint == ("tool:http https://example.org", "tool:lookup")
        assert SECRET.encode() not in log.path.read_bytes()

    async def test_what_utf8_cannot_hold_has_a_hash_all_the_same(self, tmp_path):
        log = AuditLog(tmp_path, LONG_S)
        assert log.digest({"a": "\ud800"}) != log.digest({"a": "\ud801"})
        log.close()


def altered(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3].replace(b'"deny"', b'"allow"'), *lines[4:]]


TAMPERED = {
    "altered": (altered, "altered", 3),
    "removed": (lambda lines: lines[:2] + lines[3:], "removed", 2),
    "removed, two": (lambda lines: lines[:2] + lines[4:], "removed", 2),
    "reordered": (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], "reordered", 2),
    "put in twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], "duplicate", 2),
    "put in, numbers made anew": (lambda lines: [*lines[:2], *chained(lines)[1:2], *lines[2:]], "duplicate", 1),
    "header altered": (lambda lines: [lines[0].replace(b"build", b"built"), *lines[1:]], "header", 0),
    "header of another": (lambda lines: [lines[0].replace(b'"chain":"', b'"chain":"x'), *lines[1:]], "header", 0),
    "header gone": (lambda lines: lines[1:], "header", 0),
    "no JSON": (lambda lines: [*lines[:2], b"{\n", *lines[3:]], "unreadable", 2),
    "cut off": (lambda lines: lines[:4], "cut off", 5),
    "emptied": (lambda lines: [], "cut off", 5),
    "all made anew": (lambda lines: chained(altered(lines)), "other head", 5),
    "one taken out, all made anew": (lambda lines: chained(lines[:2] + lines[3:]), "cut off", 5),
    "last one torn": (lambda lines: [*lines[:5], lines[5][:40]], "cut off", 5),
    "last one without its newline": (lambda lines: [*lines[:5], lines[5][:-1]], "cut off", 5),
}


class TestVerify:
    async def test_a_whole_chain_holds(self, tmp_path):
        log, heads = await write_chain(tmp_path)
        report = verify(tmp_path, {f"e{number}": head for number, head in enumerate(heads)})
        assert report.holds and report.heads == 6
        (chain,) = report.chains
        assert (chain.entries, chain.torn, chain.by_kind) == (5, False, {"decision": 5})
        assert chain.denied == {"capability:network": 1} and chain.chain == log.chain

    @pytest.mark.parametrize("case", TAMPERED)
    async def test_what_was_done_to_it_is_named(self, case, tmp_path):
        change, kind, number = TAMPERED[case]
        log, heads = await write_chain(tmp_path)
        log.path.write_bytes(b"".join(change(lines_of(log))))
        report = verify(tmp_path, {"e": heads[-1]})
        assert not report.holds
        assert (kind, number) in [(each.kind, each.number) for each in report.breaks]

    async def test_any_changed_byte_up_to_a_head_shows(self, tmp_path):
        log, heads = await write_chain(tmp_path, 2)
        whole = log.path.read_bytes()
        for place in range(len(whole)):
            log.path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert not verify(tmp_path, {"e": heads[-1]}).holds, place

    async def test_a_torn_last_line_that_nobody_names_is_a_crash(self, tmp_path):
        log, heads = await write_chain(tmp_path)
        lines = lines_of(log)
        for kept in range(len(lines[5])):
            log.path.write_bytes(b"".join(lines[:5]) + lines[5][:kept])
            report = verify(tmp_path, {"e": heads[4]})
            assert report.holds
            assert report.chains[0].torn is (kept > 0) and report.chains[0].entries == 4

    async def test_episodes_without_their_chain_are_named(self, tmp_path):
        log, heads = await write_chain(tmp_path)
        log.path.unlink()
        report = verify(tmp_path, {"gone": heads[2], "silent": "", "odd": "nonsense"})
        assert {(each.kind, each.episode) for each in report.breaks} == {
            ("no chain", "gone"),
            ("no head", "silent"),
            ("no head", "odd"),
        }
        assert report.chains == ()

    def test_no_audit_and_nobody_who_names_one_holds(self, tmp_path):
        assert verify(tmp_path / "none", {}).holds


@pytest.mark.parametrize("text", ["", "a", "a:b:c", "a:-1:c", "a:1", "a:1:", ":1:c", "a:\u00b2:c"])
def test_what_is_no_head_is_refused(text):
    with pytest.raises(ValueError, match="CHAIN:NUMBER:HASH"):
        Head.parse(text)


def test_an_entry_knows_its_episode():
    assert Entry(1, 0.0, "c", "open", "", "run.t1.0.0/a/b#7").episode == "run.t1.0.0/a"

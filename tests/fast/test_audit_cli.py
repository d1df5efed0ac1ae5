"""`headrace audit verify | show`: on a local run root and on one behind a URL."""

import json
import os
from pathlib import Path

import fsspec
import pytest
from command_line import call_main

from headrace.actors.gateway.audit.log import AuditLog
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import Role
from headrace.platform.records.turn import ToolCallRecord
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn

BROKEN, USAGE = 1, 2
RUN = "test-run"
LONG_S = 60.0


def called(group: int, answered: bool = True, **fields: object) -> Episode:
    """An episode that called a tool once."""
    episode_id = make_episode(group=group).episode_id
    call = ToolCallRecord(
        index=0, call_id="c", name="lookup", key=f"{episode_id}/main/0", result_hash="ab" if answered else ""
    )
    turns = (plain_turn(Role.USER, "What is it?"), policy_turn(tool_calls=(call,)), plain_turn(Role.TOOL, "1"))
    return make_episode(turns, group=group, **fields)


def store(root: RunRoot, *episodes: Episode) -> None:
    EpisodeStore(root.url).write([(each, episode_codec.encode(each)) for each in episodes], "w")


@pytest.fixture
async def root(tmp_path):
    """A run with two episodes that called tools, one that could not, one that had no need to."""
    root = RunRoot.create(str(tmp_path / "runs"), RUN, "seed: 1\n")
    log = AuditLog(root.local("audit"), LONG_S)
    episodes = []
    for group in range(2):
        scope = f"{make_episode(group=group).episode_id}/main#6a"
        log.append("open", scope)
        log.append("decision", scope, "k/0", "lookup", decision="allow", tier="read", capability="read")
        denied = ("deny", "capability:network")
        log.append("decision", scope, "k/1", "\x1b[31mhttp", decision=denied[0], rule=denied[1])
        await log.durable()
        episodes.append(called(group, audit_head=log.head))
    log.close()
    store(root, *episodes, called(2, answered=False), make_episode(group=3))
    return root


@pytest.fixture
def audit(root, monkeypatch, capsys):
    """Run `headrace audit ARGS`: its exit code, and what it printed."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(Path(root.url).parents[1])

    def call(*args: str) -> tuple[int, str]:
        code = call_main(monkeypatch, "audit", *args)
        return code, capsys.readouterr().out

    return call


def chain(root: RunRoot) -> Path:
    (path,) = root.local("audit").glob("*.jsonl")
    return path


class TestVerify:
    def test_a_whole_audit_holds(self, audit):
        code, out = audit("verify", RUN)
        assert code == 0 and "The audit holds." in out
        assert "6 entries in 1 chains, named by 2 episodes" in out and "2 denied by capability:network" in out

    def test_as_json(self, audit, root):
        code, out = audit("verify", "test", "--json")
        facts = json.loads(out.splitlines()[-1])
        assert code == 0 and facts["holds"] and (facts["run"], facts["entries"], facts["heads"]) == (RUN, 6, 2)
        (only,) = facts["chains"]
        assert only["chain"] == chain(root).stem and only["by_kind"] == {"open": 2, "decision": 4}

    def test_a_changed_entry_is_named_and_fails(self, audit, root):
        chain(root).write_bytes(chain(root).read_bytes().replace(b'"deny"', b'"allow"', 1))
        code, out = audit("verify", RUN)
        assert code == BROKEN and "BROKEN (altered)" in out and "does not hold" in out

    def test_an_episode_whose_entries_are_gone_is_named(self, audit, root):
        lines = chain(root).read_bytes().splitlines(keepends=True)
        chain(root).write_bytes(b"".join(lines[:4]))
        code, out = audit("verify", RUN, "--json")
        (found,) = json.loads(out.splitlines()[-1])["breaks"]
        assert code == BROKEN and found["kind"] == "cut off" and found["episode"] == make_episode(group=1).episode_id

    def test_an_episode_that_names_no_entry_is_named(self, audit, root):
        store(root, called(4))
        code, out = audit("verify", RUN, "--json")
        (found,) = json.loads(out.splitlines()[-1])["breaks"]
        assert code == BROKEN and found["kind"] == "no head" and found["episode"] == make_episode(group=4).episode_id

    def test_calls_of_the_parent_of_a_branch_are_not_its_own(self, audit, root):
        parent = called(0)
        store(root, make_episode(parent.turns, group=5, parent_episode=parent.episode_id))
        assert audit("verify", RUN)[0] == 0

    def test_a_run_without_calls_has_nothing_to_break(self, audit, root):
        RunRoot.create("runs", "other", "seed: 1\n")
        code, out = audit("verify", "other")
        assert code == 0 and "0 entries in 0 chains" in out


class TestShow:
    def test_the_newest_entries(self, audit):
        code, out = audit("show", RUN, "--last", "2", "--json")
        entries = json.loads(out.splitlines()[-1])["entries"]
        assert code == 0 and [each["number"] for each in entries] == [5, 6]
        code, out = audit("show", RUN)
        assert code == 0 and "capability:network" in out and make_episode(group=1).episode_id in out
        assert "\x1b" not in out  # somebody's name of a tool

    def test_those_of_an_episode(self, audit):
        episode_id = make_episode(group=1).episode_id
        for prefix in (episode_id, episode_id.removeprefix(f"{RUN}.")):
            code, out = audit("show", RUN, prefix, "--json")
            facts = json.loads(out.splitlines()[-1])
            assert code == 0 and facts["episode"] == episode_id
            assert [each["kind"] for each in facts["entries"]] == ["open", "decision", "decision"]

    @pytest.mark.parametrize("prefix", ["nobody", "t"])
    def test_none_or_several_is_wrong_usage(self, prefix, audit):
        assert audit("show", RUN, prefix)[0] == USAGE


def test_a_root_behind_a_url(root, monkeypatch, capsys):
    url = f"memory://audit-{os.urandom(4).hex()}"
    fsspec.filesystem("memory").put(root.url, url.removeprefix("memory:/") + "/" + RUN, recursive=True)
    assert call_main(monkeypatch, "audit", "verify", RUN, "--runs-dir", url, "--json") == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["holds"] and (facts["entries"], facts["heads"]) == (6, 2)


def test_help_says_what_it_is_for(monkeypatch, capsys):
    assert call_main(monkeypatch, "audit", "verify", "--help") == 0
    assert "headrace audit verify" in capsys.readouterr().out

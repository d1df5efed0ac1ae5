"""Readable episodes: what they show, and that nothing a model says can break out of its fence."""

import re
from pathlib import Path

import pytest

from headrace.actors.plan import PlayedEpisode
from headrace.deploy.samples import samples_text, varied, write_samples
from headrace.platform.records import (
    FaultOwner,
    RewardKind,
    RewardRow,
    Role,
    Status,
    StopReason,
    Task,
    ToolCallRecord,
)
from headrace.platform.store.run_root import RunRoot
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.platform.testing.fakes.renderer import CharRenderer


def played(score=1.0, *, group=0, **fields):
    episode = make_episode(group=group, **fields)
    row = RewardRow(episode_id=episode.episode_id, kind=RewardKind.OUTCOME, value=score, valid=score is not None)
    return PlayedEpisode(episode=episode, rewards=(row,), score=score)


def saying(*turns, **fields):
    return samples_text([played(turns=turns, **fields)], None, 10)


def test_an_episode_reads_from_the_task_to_the_reward():
    call = ToolCallRecord(index=0, call_id="", name="get", arguments={"key": "a"}, status=Status.OK)
    text = saying(
        plain_turn(Role.USER, "find a"),
        policy_turn("", reasoning="I look it up.", tool_calls=(call,), version=3),
        plain_turn(Role.TOOL, "a=@b"),
        policy_turn("b", version=3),
        version=3,
        task=Task("t-1", "counter", {"chain": ["a", "b"]}),
    )
    wanted = ["# Step 10: 1 episode", "## 1. score 1", "policy@v3", "`t-1`", "reward outcome: 1", '"chain"']
    wanted += ["### 0. user", "find a", "### 1. assistant", "I look it up.", 'get({"key": "a"})', "### 2. tool", "a=@b"]
    places = [text.index(each) for each in wanted]
    assert places == sorted(places)
    assert "2 turns, 6 tokens sampled" in text


def outside_of_fences(text):
    """The lines that Markdown reads as Markdown (CommonMark 4.5: a fence is closed by one at least as long)."""
    outside, fence = [], ""
    for line in text.splitlines():
        found = re.match(r" {0,3}(`{3,})([^`]*)$", line)
        if fence:
            if found and len(found[1]) >= len(fence) and not found[2].strip():
                fence = ""
        elif found:
            fence = found[1]
        else:
            outside.append(line)
    assert not fence, "a fence is left open"
    return outside


@pytest.mark.parametrize(
    "text",
    [
        "```\n# not a heading\n```",
        "````python\n# not a heading",
        "`" * 40 + "\n# not a heading",
        "\r```\r# not a heading\r",
        "~~~\n# not a heading\n</details><script>",
        "a\n\n# not a heading",
    ],
)
def test_nothing_that_is_said_gets_out_of_its_fence(text):
    call = ToolCallRecord(index=0, call_id="", name=text, arguments={"key": text})
    shown = saying(
        plain_turn(Role.USER, text),
        policy_turn(text, reasoning=text, tool_calls=(call,)),
        task=Task(text, "counter", {"text": text}),
        fault=text,
    )
    outside = outside_of_fences(shown)
    assert sum(line.startswith("#") for line in outside) == 4, "the step, the episode and its two turns"
    assert not any("not a heading" in line and not line.startswith("- ") for line in outside)


def test_what_cannot_be_seen_is_spelled_out():
    shown = saying(plain_turn(Role.USER, "a\x1b[2Jb\u202ec\x00\ud800é\tz"))
    assert "a\\u001b[2Jb\\u202ec\\u0000\\ud800é\tz" in shown
    shown.encode()


def test_what_is_long_loses_its_middle():
    shown = saying(plain_turn(Role.USER, "begin" + "x" * 50_000 + "end"))
    assert len(shown) < 10_000
    assert "begin" in shown and "end\n" in shown and "44008 characters left out" in shown


def test_a_turn_without_text_shows_what_was_sampled():
    turns = (plain_turn(Role.USER, "say"), policy_turn("", token_ids=[ord(c) for c in "<<?"]))
    each = played(turns=turns)
    assert "<<?" in samples_text([each], CharRenderer(), 1)
    assert "As sampled" not in samples_text([each], None, 1)


def test_a_fault_is_no_score():
    broken = {"status": Status.ENV_BUG, "fault_owner": FaultOwner.ENVIRONMENT, "fault": "KeyError: 'x'"}
    text = samples_text([played(None, terminated=False, stop_reason=StopReason.FAULT, **broken)], None, 1)
    assert "## 1. no score" in text
    assert "reward outcome: not valid" in text
    assert "fault of environment: `KeyError: 'x'`" in text


def test_the_choice_is_varied():
    many = [played(score, group=n) for n, score in enumerate([0.2, None, 1.0, 0.0, 0.6, 0.4, 0.8])]
    assert [each.score for each in varied(many, 1)] == [1.0]
    assert [each.score for each in varied(many, 2)] == [1.0, 0.0]
    assert [each.score for each in varied(many, 4)] == [1.0, 0.6, 0.4, 0.0]
    assert [each.score for each in varied(many, 7)] == [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, None]
    assert len(varied(many, 20)) == 7
    assert varied([], 3) == varied(many, 0) == []


def test_the_file_lies_in_the_run(tmp_path):
    root = RunRoot.create(str(tmp_path), "run-1", "")
    write_samples(root, [played(0.0), played(1.0, group=1)], None, 10, 1)
    text = (tmp_path / "run-1" / "logs" / "samples" / "step-000010.md").read_text()
    assert text.startswith("# Step 10: 1 episode\n") and "test-run.t1.0.0" in text
    write_samples(root, [], None, 20, 1)
    assert len(list((tmp_path / "run-1" / "logs" / "samples").iterdir())) == 1, "nothing played, nothing written"


def test_what_cannot_be_written_is_in_the_log(tmp_path, caplog):
    root = RunRoot.create(str(tmp_path), "run-1", "")
    Path(tmp_path / "run-1" / "logs" / "samples").write_text("a file where the folder should be")
    write_samples(root, [played()], None, 10, 1)
    assert "samples of step 10 could not be written" in caplog.text

"""Where a stage's traces come from: what is kept, held out and left out, and why; episodes as they were sampled."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from episode_kit import CHATML, chatml_renderer, lookup_renderer

from headrace.actors.demonstrations.loss import unknown_token
from headrace.deploy.demonstrations.gathering import HELD_OUT_SHARE, Gathering
from headrace.deploy.demonstrations.sources import chat_demonstrations, episode_demonstrations
from headrace.deploy.vocabulary import vocabulary_files
from headrace.platform.errors import ConfigError
from headrace.platform.records import AttemptId, Role, Task
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Digests
from headrace.platform.records.status import FaultOwner, Purpose, RewardKind, Status, StopReason
from headrace.platform.records.tables import RewardRow
from headrace.platform.records.turn import View
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def gathered(count: int, **options) -> Gathering:
    gathering = Gathering(100, **options)
    for number in range(count):
        gathering.add(f"prompt {number}", [9, number, 1], [0, 0, 1])
    return gathering


def ids(traces) -> list[list[int]]:
    return [trace.token_ids.tolist() for trace in traces]


class TestGathering:
    def test_an_epoch_shows_every_trace_once_in_an_order_of_its_own(self):
        shown = gathered(8).demonstrations("f", 0, {})
        first, second = ids(islice(shown.traces, 8)), ids(islice(shown.traces, 8))
        assert sorted(first) == sorted(second) == [[9, n, 1] for n in range(8)]
        assert first != second
        assert (shown.size, shown.held_out) == (8, ())

    def test_the_seed_decides_the_order(self):
        orders = [ids(islice(gathered(8).demonstrations("f", seed, {}).traces, 8)) for seed in (0, 0, 1)]
        assert orders[0] == orders[1] != orders[2]

    def test_a_share_of_the_prompts_is_held_out_and_never_trained(self):
        gathering = gathered(200)
        for number in range(200):  # a second answer to each prompt
            gathering.add(f"prompt {number}", [9, number, 2], [0, 0, 1])
        shown = gathering.demonstrations("f", 0, {})
        apart = {trace.token_ids[1] for trace in shown.held_out}
        assert len(apart) == 200 * HELD_OUT_SHARE and len(shown.held_out) == 2 * len(apart)
        assert not apart & {trace[1] for trace in ids(islice(shown.traces, shown.size))}
        assert shown.counts["kept"] + shown.counts["held_out"] == 400

    def test_what_is_left_out_is_counted_by_reason(self):
        gathering = Gathering(4, once=True)
        for token_ids, mask in (
            ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1]),
            ([1, 2], [0, 1]),
            ([1, 2], [0, 1]),
            ([1, 2], [0, 0]),
            ([1, 2], [1, 0]),  # nothing predicts the first token
            ([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 0]),  # cut after what is imitated
        ):
            gathering.add("k", token_ids, np.array(mask, np.uint8))
        shown = gathering.demonstrations("f", 0, {"rows": 6})
        assert shown.counts == {
            "rows": 6,
            "kept": 2,
            "held_out": 0,
            "left_out": {"duplicate": 1, "nothing_to_imitate": 2, "too_long": 1},
        }
        assert sorted(ids(islice(shown.traces, 2))) == [[1, 2], [1, 2, 3, 4]]

    def test_nothing_left_says_what_became_of_it(self):
        gathering = Gathering(2)
        gathering.add("k", [1, 2, 3], [0, 0, 1])
        with pytest.raises(
            ConfigError, match=r"f: no trace is left to imitate \(1 rows, 1 too_long\).*`max_tokens` is 2"
        ):
            gathering.demonstrations("f", 0, {"rows": 1})


class TestChats:
    def written(self, folder, *rows):
        file = folder / "chats.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def row(self, key: str, value: str, **fields):
        call = {"function": {"name": "get", "arguments": {"key": key}}}
        return {
            "messages": [
                {"role": "user", "content": f"find {key}"},
                {"role": "assistant", "tool_calls": [call], **fields},
                {"role": "tool", "content": f"{key}={value}"},
                {"role": "assistant", "content": value, **fields},
            ]
        }

    def test_rows_become_traces_and_counts(self, tmp_path):
        renderer = lookup_renderer(tmp_path)
        file = self.written(
            tmp_path, self.row("k01", "v01"), self.row("k02", "v02"), self.row("k03", "v03", train=False)
        )
        shown = chat_demonstrations(file, renderer, 100, 0)
        assert shown.counts == {
            "rows": 3,
            "segments_opened": 0,
            "notes": {},
            "kept": 2,
            "held_out": 0,
            "left_out": {"nothing_to_imitate": 1},
        }
        (text,) = {
            renderer.decode(t.token_ids.tolist())
            for t in islice(shown.traces, 2)
            if "k01" in renderer.decode(t.token_ids.tolist())
        }
        assert text == "<user>find k01<end><asst><call>get k01</call><end><tool>k01=v01<end><asst>v01<end>"

    def test_rows_that_the_template_cannot_express_are_named(self, tmp_path):
        renderer = lookup_renderer(tmp_path)
        bad = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "reasoning": "hm"}]}
        with pytest.raises(ConfigError, match=r"(?s)cannot express.*chats\.jsonl:2: message 1: .*reasoning_content"):
            chat_demonstrations(self.written(tmp_path, self.row("k01", "v01"), bad), renderer, 100, 0)


class TestWhatTheModelDoesNotSee:
    def written(self, folder, *rows):
        return TestChats().written(folder, *rows)

    def test_a_row_whose_assistant_says_unknown_words_is_named(self, tmp_path):
        renderer, known = lookup_renderer(tmp_path), {"role": "user", "content": "find k01"}
        file = self.written(tmp_path, *({"messages": [known, said(text)]} for text in ("v01", "Zürich")))
        with pytest.raises(ConfigError, match=r"(?s)chats\.jsonl:2: message 1: its content 'Zürich' reads back as"):
            chat_demonstrations(file, renderer, 100, 0, unknown_token(tmp_path))

    def test_the_unknown_word_itself_is_not_imitated(self, tmp_path):
        """It reads back as it was written."""
        renderer, unknown = lookup_renderer(tmp_path), unknown_token(tmp_path)
        row = {"messages": [{"role": "user", "content": "find k01"}, said(renderer.decode([unknown]))]}
        with pytest.raises(ConfigError, match=r"chats\.jsonl:1: the assistant says something that .* no tokens for"):
            chat_demonstrations(self.written(tmp_path, row), renderer, 100, 0, unknown)

    def test_unknown_words_of_others_are_counted_by_row(self, tmp_path):
        renderer = lookup_renderer(tmp_path)
        rows = [{"messages": [{"role": "user", "content": f"find {key}"}, said("v01")]} for key in ("k01", "é", "ü ö")]
        shown = chat_demonstrations(self.written(tmp_path, *rows), renderer, 100, 0, unknown_token(tmp_path))
        assert shown.counts["notes"] == {"unknown_words": 2} and shown.counts["kept"] == 3

    def test_a_vocabulary_of_bytes_knows_everything(self, tmp_path):
        for name, data in vocabulary_files("bytes", (), 0).items():
            (tmp_path / name).write_bytes(data)
        assert unknown_token(tmp_path) is None

    def test_messages_that_the_template_leaves_out_are_counted_by_row(self, tmp_path):
        template = CHATML.replace("for message in messages", "for message in messages if message.role != 'system'")
        assert template != CHATML
        system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}
        rows = [
            {"messages": [system, user, said("a")], "tools": [{"name": "f"}]},
            {"messages": [user, said("a"), system, user, said("b")]},
            {"messages": [user, said("a")]},
            {"messages": [{**system, "content": " "}, user, said("a")]},
        ]
        shown = chat_demonstrations(self.written(tmp_path, *rows), chatml_renderer(template), 100, 0)
        assert shown.counts["notes"] == {"system_not_shown": 2, "tools_not_shown": 1}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


CALLED, ANSWERED = [30, 31, 1], [40, 1]


class Stored:
    """A run root with episodes that were never played, and their rewards."""

    def __init__(self, folder, digest: str) -> None:
        self.root = RunRoot.create(str(folder), "run-1", "name: run\n")
        self._digest = digest
        self._number = 0

    def add(
        self,
        *scores: float | None,
        split: str = "train",
        task: str = "",
        purpose=Purpose.TRAIN,
        answer=ANSWERED,
        **fields,
    ):
        """An episode of two policy turns; each score is a reward component, None an invalid one."""
        number = self._number
        self._number += 1
        turns = fields.pop("turns", None) or (
            plain_turn(Role.USER, "find", [10, 11, 12]),
            policy_turn("", CALLED),
            plain_turn(Role.TOOL, "found", [20, 21]),
            policy_turn("", answer),
        )
        episode = make_episode(
            turns,
            **{
                "attempt_id": AttemptId("run-1", number, 0, purpose=purpose),
                "task": Task(task or f"task-{number}", "lookup", split=split),
                "environment": "lookup",
                "digests": Digests(tokenizer=self._digest),
                **fields,
            },
        )
        EpisodeStore(self.root.url).write([(episode, episode_codec.encode(episode))], "w")
        rows = [
            RewardRow(episode_id=episode.episode_id, kind=kind, value=score, valid=score is not None)
            for kind, score in zip((RewardKind.OUTCOME, RewardKind.COST), scores, strict=False)
        ]
        RewardTable(self.root.url, "w").append(rows)
        return episode


@pytest.fixture
def renderer(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return lookup_renderer(folder)


@pytest.fixture
def stored(tmp_path, renderer):
    return Stored(tmp_path, renderer.digest)


def chosen(stored: Stored, renderer, text: str = "score >= 1", max_tokens: int = 100):
    return episode_demonstrations(stored.root, text, renderer, max_tokens, 0)


FILTERS = {
    "turns <= 2": 2,
    "turns < 2": 1,
    "tokens == 5": 1,
    "version == 0": 2,
    "environment == 'lookup' and purpose == 'train' and status == 'OK'": 2,
    "task_id == 'short'": 1,
    "split == 'train'": 2,
    "split != 'dev'": 2,
}


class TestEpisodes:
    # case T1
    def test_traces_are_the_sampled_tokens(self, stored, renderer):
        stored.add(1.0)
        shown = chosen(stored, renderer)
        trace = next(shown.traces)
        assert trace.token_ids.tolist() == [10, 11, 12, *CALLED, 20, 21, *ANSWERED]
        assert trace.action_mask.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]

    def test_counts_add_up(self, stored, renderer):
        stored.add(1.0)
        stored.add(1.0, answer=[41, 1])
        stored.add(1.0, answer=[41, 1])  # the same again
        stored.add(0.0, answer=[42, 1])
        stored.add(None)
        stored.add()
        stored.add(1.0, split="dev", purpose=Purpose.EVAL)
        stored.add(1.0, answer=[43] * 200)
        counts = chosen(stored, renderer).counts
        assert counts == {
            "episodes": 8,
            "kept": 2,
            "held_out": 0,
            "left_out": {"duplicate": 1, "filtered": 1, "no_valid_score": 2, "split_dev": 1, "too_long": 1},
        }
        assert counts["kept"] + sum(counts["left_out"].values()) == counts["episodes"]

    def test_an_invalid_component_leaves_no_score(self, stored, renderer):
        """Failure is never a reward: the valid part alone would be taken for the whole."""
        stored.add(1.0, None)
        stored.add(0.75, 0.5, answer=[41, 1])
        assert chosen(stored, renderer).counts["left_out"] == {"no_valid_score": 1}

    def test_a_faulty_episode_is_never_taken(self, stored, renderer):
        stored.add(1.0)
        stored.add(
            status=Status.ENV_BUG,
            stop_reason=StopReason.FAULT,
            terminated=False,
            fault_owner=FaultOwner.ENVIRONMENT,
            fault="broken",
        )
        assert chosen(stored, renderer, "score >= 0 or turns >= 0").counts["left_out"] == {"no_valid_score": 1}

    @pytest.mark.parametrize("text", FILTERS)
    def test_every_fact_can_be_asked_for(self, text, stored, renderer):
        stored.add(1.0)
        stored.add(1.0, task="short", turns=(plain_turn(Role.USER, "find", [10]), policy_turn("", [44, 1])))
        assert chosen(stored, renderer, text).counts["kept"] == FILTERS[text]

    # case V2
    @pytest.mark.parametrize("split", ["dev", "hidden"])
    def test_evaluation_tasks_are_never_imitated(self, split, stored, renderer):
        stored.add(1.0)
        stored.add(1.0, split=split, answer=[41, 1])
        assert chosen(stored, renderer).counts["left_out"] == {f"split_{split}": 1}
        for text in (f"split == '{split}'", "split != 'test'", f"split in ('train', '{split}')"):
            with pytest.raises(ConfigError, match=f"of the {split} split"):
                chosen(stored, renderer, text)

    def test_another_tokenizer_is_refused(self, stored, renderer, tmp_path):
        stored.add(0.0, digests=Digests(tokenizer="other"))
        stored.add(1.0)
        assert chosen(stored, renderer).counts["kept"] == 1
        stored.add(1.0, digests=Digests(tokenizer="other"))
        with pytest.raises(ConfigError, match=r"run-1\.t2\.0\.0 was sampled with another tokenizer"):
            chosen(stored, renderer)

    # case T17
    def test_a_context_that_was_opened_anew_is_a_trace_of_its_own(self, stored, renderer):
        turns = (
            plain_turn(Role.USER, "a", [10]),
            policy_turn("", [30, 1]),
            plain_turn(Role.USER, "b", [10, 50, 51], segment=1),
            policy_turn("", [31, 1], segment=1),
        )
        stored.add(1.0, turns=turns, views=(View(1, ((0, 1),)), View(3, ((2, 3),), 1)))
        shown = chosen(stored, renderer)
        assert sorted(ids(islice(shown.traces, 2))) == [[10, 30, 1], [10, 50, 51, 31, 1]]

    def test_episodes_of_a_task_are_held_out_together(self, stored, renderer):
        for number in range(24):
            stored.add(1.0, task=f"task-{number % 12}", answer=[60 + number, 1])
        shown = chosen(stored, renderer)
        held = Counter((trace.token_ids[-2] - 60) % 12 for trace in shown.held_out)
        assert list(held.values()) == [2]

    def test_nothing_left_is_an_error_that_counts(self, stored, renderer):
        stored.add(0.0)
        with pytest.raises(ConfigError, match=r"1 episodes, 1 filtered"):
            chosen(stored, renderer)

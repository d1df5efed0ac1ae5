"""Train, dev and hidden are kept apart by task and by seed, whatever the rows come from (case V2)."""

import json
import logging
import random
from typing import ClassVar

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.tasks import open_tasks, rows_tasks
from headrace.actors.tasks.reading import read_given
from headrace.actors.tasks.splits import Shares
from headrace.platform.config import TasksConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import Task

SPLITS = ("train", "dev", "hidden")


def numbers(*range_of):
    return [{"prompt": str(n)} for n in range(*range_of)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def epoch(source):
    return list(source.next(len(source)))


def divided(rows, **shares):
    return {split: {t.data["prompt"] for t in epoch(rows_tasks(rows, split, 0, "x", **shares))} for split in SPLITS}


class TestShares:
    def test_every_row_has_one_split_and_the_shares_hold(self):
        parts = divided(numbers(5000), dev_share=0.2, hidden_share=0.05)
        assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == 5000
        assert 900 < len(parts["dev"]) < 1100
        assert 200 < len(parts["hidden"]) < 300

    @settings(max_examples=20, deadline=None)
    @given(st.integers(100, 300), st.randoms(use_true_random=False))
    def test_rows_keep_their_split_when_others_come_or_the_order_changes(self, more, dice):
        before, rows = divided(numbers(100)), numbers(more)
        dice.shuffle(rows)
        after = divided(rows)
        assert all(before[split] <= after[split] for split in SPLITS)

    def test_an_id_does_not_decide(self):
        with_ids = [{**row, "id": 1000 - n} for n, row in enumerate(numbers(100))]
        assert divided(with_ids) == divided(numbers(100))

    def test_a_source_too_small_for_its_shares_gives_a_row_and_says_so(self, caplog):
        with caplog.at_level(logging.WARNING):
            parts = divided(numbers(3))
        assert {split: len(rows) for split, rows in parts.items()} == {"train": 1, "dev": 1, "hidden": 1}
        assert "one of 3 rows is held out as dev" in caplog.text

    def test_a_split_without_rows_says_what_to_do(self):
        with pytest.raises(ConfigError, match=r"none of the 1 rows of x is in the split 'dev'; give tasks\.dev_share"):
            rows_tasks(numbers(1), "dev", 0, "x")
        with pytest.raises(ConfigError, match="'hidden'"):
            rows_tasks(numbers(100), "hidden", 0, "x", hidden_share=0)

    def test_one_digest_and_many_are_decided_alike(self):
        rows, shares = read_given(numbers(300)), Shares(dev=0.3, hidden=0.2)
        for split, indices in shares.divide(rows).items():
            assert {shares.split_of(rows.digest(int(index))) for index in indices} == {split}


class TestOwnSources:
    def test_each_split_from_its_own(self, tmp_path):
        config = TasksConfig(
            source=write(tmp_path / "a.jsonl", numbers(50)),
            dev=write(tmp_path / "b.jsonl", numbers(50, 60)),
            hidden=write(tmp_path / "c.jsonl", numbers(60, 65)),
        )
        assert [len(open_tasks(config, split, 0, "x")) for split in SPLITS] == [50, 10, 5]

    def test_one_from_its_own_and_one_as_a_share(self, tmp_path):
        file = write(tmp_path / "a.jsonl", numbers(200))
        config = TasksConfig(source=file, dev=write(tmp_path / "b.jsonl", numbers(200, 210)))
        sizes = [len(open_tasks(config, split, 0, "x")) for split in SPLITS]
        assert sizes[0] + sizes[2] == 200
        assert sizes[1] == 10

    @pytest.mark.parametrize("split", SPLITS)
    def test_a_task_in_two_of_them_is_refused(self, tmp_path, split):
        config = TasksConfig(
            source=write(tmp_path / "a.jsonl", numbers(50)),
            dev=write(tmp_path / "b.jsonl", [{"id": f"mine-{n}", **row} for n, row in enumerate(numbers(41, 60))]),
        )
        with pytest.raises(ConfigError, match=r"[ab]\.jsonl:\d+ of \w+ is the same task as .*[ab]\.jsonl:\d+ of"):
            open_tasks(config, split, 0, "x")

    def test_also_in_the_splits_of_a_data_set(self):
        parts = {"train": numbers(9), "test": numbers(8, 12)}
        with pytest.raises(ConfigError, match=r"dataset\[t.*\]:\d of .* is the same task as dataset\[t.*\]:\d of"):
            rows_tasks(
                datasets.DatasetDict({k: datasets.Dataset.from_list(rows) for k, rows in parts.items()}),
                "train",
                0,
                "x",
            )

    def test_ids_that_begin_anew_in_each_source_stay_apart(self, tmp_path):
        files = {
            name: write(tmp_path / f"{name}.jsonl", [{"id": n, "p": name + str(n)} for n in range(5)])
            for name in SPLITS
        }
        config = TasksConfig(source=files["train"], dev=files["dev"], hidden=files["hidden"])
        ids = {split: {task.task_id for task in epoch(open_tasks(config, split, 0, "x"))} for split in SPLITS}
        assert ids["train"] == {str(n) for n in range(5)}
        assert len(set.union(*ids.values())) == 15


class TestSeeds:
    def test_a_seed_of_two_splits_is_refused(self):
        rows = [{"prompt": str(n), "seed": n // 2} for n in range(100)]
        with pytest.raises(
            ConfigError, match=r"rows:\d+ of \w+ and rows:\d+ of \w+ have the same seed \d+: evaluation"
        ):
            rows_tasks(rows, "train", 0, "x")

    def test_a_seed_column_is_the_seed(self):
        rows = [{"prompt": str(n), "seed": n + 5} for n in range(100)]
        for split in SPLITS:
            assert all(task.seed == task.data["seed"] for task in epoch(rows_tasks(rows, split, 0, "x")))

    def test_zero_is_a_seed_like_any_other(self):
        tasks = [
            task for split in SPLITS for task in epoch(rows_tasks([{"p": 1, "seed": 0}, *numbers(9)], split, 0, "x"))
        ]
        (zero,) = [task for task in tasks if "p" in task.data]
        assert zero.seed > 0

    def test_derived_seeds_are_new_each_epoch_and_never_those_of_another_split(self):
        seeds = {}
        for split in SPLITS:
            source = rows_tasks(numbers(200), split, 0, "x")
            seeds[split] = [task.seed for task in source.next(3 * len(source))]
            assert len(set(seeds[split])) == len(seeds[split])
        assert len(set().union(*seeds.values())) == sum(map(len, seeds.values()))


class TestTasks:
    def test_the_id_and_the_version_are_the_contents(self):
        rows = numbers(40)
        first = {task.data["prompt"]: task for task in epoch(rows_tasks(rows, "train", 0, "x"))}
        random.Random(1).shuffle(rows)
        again = {task.data["prompt"]: task for task in epoch(rows_tasks(rows[:30], "train", 0, "x"))}
        assert all((again[p].task_id, again[p].version) == (first[p].task_id, first[p].version) for p in again)
        assert len({task.task_id for task in first.values()}) == len(first)

    def test_an_id_column_names_the_task_and_the_version_tells_a_change(self):
        one = rows_tasks([{"id": "q1", "prompt": "a"}], "train", 0, "x").next(1)[0]
        two = rows_tasks([{"id": "q1", "prompt": "b"}], "train", 0, "x").next(1)[0]
        assert one.task_id == two.task_id == "q1"
        assert one.version != two.version
        assert one.data == {"id": "q1", "prompt": "a"}

    def test_an_epoch_has_each_row_once_in_an_order_of_its_own(self):
        source = rows_tasks(numbers(100), "train", 0, "x")
        epochs = [[task.task_id for task in epoch(source)] for _ in range(3)]
        assert all(len(set(order)) == len(order) for order in epochs)
        assert len({tuple(order) for order in epochs}) == 3
        assert len({frozenset(order) for order in epochs}) == 1
        other = rows_tasks(numbers(100), "train", 1, "x")
        assert [task.task_id for task in epoch(other)] not in epochs

    def test_an_order_is_for_ever(self):
        """A stored position means the same tasks with the next version of every library."""
        source = rows_tasks([{"n": n} for n in range(10)], "train", 7, "x", dev_share=0, hidden_share=0)
        assert [task.data["n"] for task in source.next(10)] == [1, 4, 2, 3, 0, 5, 6, 8, 9, 7]

    def test_repeated_rows_are_played_once_and_counted(self, caplog):
        with caplog.at_level(logging.WARNING):
            tasks = [
                task.task_id
                for split in SPLITS
                for task in epoch(rows_tasks(numbers(100) + numbers(50), split, 0, "x"))
            ]
        assert len(tasks) == len(set(tasks)) == 100
        assert "rows: 50 rows are there more than once and count as one each" in caplog.text

    def test_limit(self, tmp_path):
        config = TasksConfig(source=write(tmp_path / "a.jsonl", numbers(100)), limit=20)
        prompts = {task.data["prompt"] for split in SPLITS for task in epoch(open_tasks(config, split, 0, "x"))}
        assert prompts == {str(n) for n in range(20)}

    def test_rows_that_are_of_one_split_already(self):
        assert len(epoch(rows_tasks(numbers(100), "dev", 0, "x", whole=True))) == 100


class TestGivenTasks:
    TASKS: ClassVar = [
        Task(f"{split}-{n}", "x", {"n": n}, split=split, seed=n + 10 * i)
        for i, split in enumerate(SPLITS)
        for n in range(1, 5)
    ]

    def test_say_themselves_where_they_belong(self):
        for split in SPLITS:
            assert sorted(t.task_id for t in epoch(rows_tasks(self.TASKS, split, 0, "x"))) == [
                f"{split}-{n}" for n in range(1, 5)
            ]

    def test_mistakes(self):
        twice = [Task("a", "x", split="train"), Task("a", "x", split="dev")]
        with pytest.raises(ConfigError, match="two tasks have the id 'a', of train and of dev"):
            rows_tasks(twice, "train", 0, "x")
        with pytest.raises(ConfigError, match="none of the 4 tasks of x is of the split 'dev'"):
            rows_tasks(self.TASKS[:4], "dev", 0, "x")


def test_keys_that_do_nothing_for_files_are_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", numbers(9))
    for key, value in (("args", {"a": 1}), ("seeds", {"train": (0, 9)})):
        with pytest.raises(ConfigError, match=rf"tasks\.{key} is for generators"):
            open_tasks(TasksConfig(source=file, **{key: value}), "train", 0, "x")

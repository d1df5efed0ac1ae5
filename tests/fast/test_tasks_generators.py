"""Functions of a seed as tasks: endless, the same for ever, and apart by content and by seed."""

import functools
from typing import ClassVar

import pytest

from headrace.actors.tasks import open_tasks, rows_tasks
from headrace.actors.tasks.generated import Maker, check_ranges, nth_of_range
from headrace.platform.config import TasksConfig
from headrace.platform.errors import ConfigError
from headrace.platform.seeding import FIRST_SPLIT_SEED

SPLITS = ("train", "dev", "hidden")

CODE = """\
import random


def sums(seed, digits=2):
    dice = random.Random(seed)
    a, b = dice.randrange(10**digits), dice.randrange(10**digits)
    return {"prompt": f"{a} + {b}", "answer": a + b}


def ten(seed):
    return {"n": seed % 10}


def spoilt(seed):
    if seed == 13:
        return {"n": {1: 2}["missing"]}
    return {"n": seed}


def lists(seed):
    yield {"n": seed}


NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "make.py").write_text(CODE)
    return tmp_path / "make.py"


def tasks(file, name, split, seed=0, count=40, **fields):
    return open_tasks(TasksConfig(source=f"{file}:{name}", **fields), split, seed, "sums").next(count)


class TestEndless:
    def test_a_position_decides(self, file):
        source = open_tasks(TasksConfig(source=f"{file}:sums"), "train", 0, "sums")
        source.restore(30)
        assert list(source.next(10)) == list(tasks(file, "sums", "train")[30:])
        assert tasks(file, "sums", "train", seed=1) != tasks(file, "sums", "train")
        assert {task.environment for task in tasks(file, "sums", "train")} == {"sums"}

    def test_args_are_passed(self, file):
        prompts = [task.data["prompt"] for task in tasks(file, "sums", "train", args={"digits": 6})]
        assert max(map(len, prompts)) > 12

    def test_splits_share_no_task_and_no_seed_however_few_tasks_there_are(self, file):
        """case V2"""
        made = {split: tasks(file, "ten", split, count=80, dev_share=0.3, hidden_share=0.3) for split in SPLITS}
        contents = [{task.data["n"] for task in made[split]} for split in SPLITS]
        assert len(set.union(*contents)) == sum(map(len, contents)) == 10
        seeds = [{task.seed for task in made[split]} for split in SPLITS]
        assert len(set.union(*seeds)) == sum(map(len, seeds))

    def test_ids_are_contents(self, file):
        made = tasks(file, "ten", "train", count=80)
        assert len({task.task_id for task in made}) == len({task.data["n"] for task in made})

    def test_a_limit_is_played_in_a_new_order_each_epoch(self, file):
        ids = [task.task_id for task in tasks(file, "sums", "train", limit=20, count=40)]
        assert set(ids[:20]) == set(ids[20:])
        assert ids[:20] != ids[20:]
        assert set(ids) == {task.task_id for task in tasks(file, "sums", "train", count=20)}

    def test_a_plain_function_will_do(self):
        def square(seed):
            return {"prompt": str(seed), "answer": str(seed * seed)}

        made = [rows_tasks(square, split, 0, "squares").next(5) for split in SPLITS]
        assert len({task.task_id for part in made for task in part}) == 15

    def test_tasks_of_a_file_are_not_made_again_by_the_generator(self, file, tmp_path):
        (tmp_path / "dev.jsonl").write_text('{"n": 3}\n{"n": 4}\n')
        fields = {"dev": str(tmp_path / "dev.jsonl"), "hidden_share": 0.2}
        trained = {task.data["n"] for task in tasks(file, "ten", "train", count=80, **fields)}
        assert not trained & {3, 4}
        assert {task.data["n"] for task in tasks(file, "ten", "dev", count=2, **fields)} == {3, 4}

    def test_a_generator_for_dev_beside_rows(self, file, tmp_path):
        (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(8)))
        config = TasksConfig(source=str(tmp_path / "rows.jsonl"), dev=f"{file}:ten", dev_share=0.9, hidden_share=0)
        made = {task.data["n"] for task in open_tasks(config, "dev", 0, "x").next(40)}
        assert made <= {8, 9}


class TestRanges:
    ALL: ClassVar = {"train": (20, 60), "dev": (60, 70), "hidden": (70, 80)}

    def test_each_seed_once_an_epoch(self, file):
        made = tasks(file, "spoilt", "train", seeds=self.ALL, count=80)
        numbers = [task.data["n"] for task in made]
        assert sorted(numbers[:40]) == sorted(numbers[40:]) == list(range(20, 60))
        assert numbers[:40] != numbers[40:]
        assert [task.seed for task in made] == numbers

    def test_a_split_without_a_range_never_reaches_into_one(self, file):
        made = tasks(file, "spoilt", "dev", seeds={"train": (20, 60)})
        assert all(task.data["n"] >= FIRST_SPLIT_SEED for task in made)

    def test_a_range_beside_drawn_seeds_leaves_the_tasks_of_other_splits_out(self, file):
        """case V2"""
        fields = {"seeds": {"train": (0, 100)}, "dev_share": 0.3, "hidden_share": 0.3}
        made = {split: {t.data["n"] for t in tasks(file, "ten", split, count=80, **fields)} for split in SPLITS}
        assert sum(map(len, made.values())) == len(set.union(*made.values())) == 10

    def test_the_same_task_from_two_ranges_is_refused(self, file):
        """case V2"""
        with pytest.raises(ConfigError, match=r"same task from seed 0 of train and from seed 100 of dev: evaluation"):
            tasks(file, "ten", "train", seeds={"train": (0, 10), "dev": (100, 110)})

    def test_ranges_end_where_the_splits_begin(self):
        maker = Maker(generate=lambda seed: {"n": seed})
        with pytest.raises(ConfigError, match=r"tasks\.seeds\.dev=.* reaches beyond 2\*\*61"):
            check_ranges({"dev": maker}, {"dev": (0, FIRST_SPLIT_SEED + 1)})

    @pytest.mark.parametrize("size", [1, 2, 6, 7, 30, 10**12])
    def test_a_range_of_any_length_is_walked_without_memory(self, size):
        count = min(size, 1000)
        seeds = {nth_of_range((5, 5 + size), 0, "train", position) for position in range(count)}
        assert len(seeds) == count
        assert min(seeds) >= 5
        assert max(seeds) < 5 + size


class Counting:
    def __init__(self, step):
        self.step = step

    def __call__(self, seed):
        return {"n": seed * self.step}

    def method(self, seed):
        return {"n": seed * self.step}


def below(seed, hi):
    return {"n": seed % hi}


class TestCallables:
    @pytest.mark.parametrize(
        "rows",
        [
            functools.partial(below, hi=50),
            functools.partial(functools.partial(below), hi=50),
            Counting(2),
            Counting(2).method,
        ],
    )
    def test_anything_that_can_be_called_with_a_seed(self, rows):
        assert rows_tasks(rows, "train", 0, "x").next(1)[0].data["n"] >= 0

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (
                functools.partial(below, 1, 2),
                r"^test_tasks_generators\.py: the generator below\(seed, \*\*args\) cannot be called: too many",
            ),
            (
                functools.partial(below, high=50),
                r"TypeError: .* unexpected keyword argument 'high' \(generator below, s",
            ),
            (Counting, "the generator returned Counting for the seed"),
            (len, r"TypeError: object of type 'int' has no len\(\) \(generator len, seed"),
            (dict, r"TypeError: 'int' object is not iterable \(generator dict, seed"),
            (object(), "the rows of x are object; give a list of dicts or a path"),
        ],
    )
    def test_what_makes_no_rows_is_said(self, rows, message):
        with pytest.raises(ConfigError, match=message):
            rows_tasks(rows, "train", 0, "x")


class TestIds:
    def test_an_id_for_two_tasks_names_two(self):
        made = rows_tasks(lambda seed: {"id": "q", "n": seed % 7}, "train", 0, "x").next(60)
        assert len({task.task_id for task in made}) == len({task.data["n"] for task in made}) > 3
        assert all(task.task_id == f"q-{task.version[:16]}" for task in made)
        assert rows_tasks(lambda seed: {"id": seed, "n": 1, "m": seed}, "train", 0, "x").next(1)[0].data["id"] > 0

    @pytest.mark.parametrize("value", [None, "", True, 1.5, [1]])
    def test_what_is_no_id_is_refused_as_in_files(self, value):
        with pytest.raises(
            ConfigError, match=r"^the generator, seed \d+: the id is .*; give each row a text or a number"
        ):
            rows_tasks(lambda seed: {"id": value, "n": seed}, "train", 0, "x")

    def test_a_row_may_repeat_the_seed_and_have_no_other(self):
        (task,) = rows_tasks(lambda seed: {"n": seed, "seed": seed}, "train", 0, "x").next(1)
        assert task.seed == task.data["seed"] == task.data["n"]
        assert rows_tasks(lambda seed: {"n": seed, "seed": None}, "train", 0, "x").next(1)[0].seed > 0
        with pytest.raises(ConfigError, match=r"returned the seed 5 for the seed \d+; a task is played with the seed"):
            rows_tasks(lambda seed: {"n": seed, "seed": 5}, "train", 0, "x")


class TestMistakes:
    def test_a_bad_row_costs_itself_only_and_names_its_line(self, file):
        source = open_tasks(
            TasksConfig(source=f"{file}:spoilt", seeds={"train": (0, 20)}, dev_share=0, hidden_share=0), "train", 0, "x"
        )
        good, bad = 0, []
        for position in range(20):
            source.restore(position)
            try:
                source.next(1)
                good += 1
            except ConfigError as error:
                bad.append(str(error))
        assert good == 19
        assert bad == ["make.py:16 in spoilt: KeyError: 'missing' (generator spoilt, seed 13)"]

    def test_what_never_works_is_found_when_it_is_opened(self, file):
        with pytest.raises(ConfigError, match=r"make\.py:16 in spoilt: KeyError"):
            tasks(file, "spoilt", "train", seeds={"train": (13, 14)})

    @pytest.mark.parametrize(
        ("name", "args", "message"),
        [
            ("sums", {"digit": 3}, r"make\.py: the generator sums\(seed, \*\*args\) cannot be called: .*'digit'"),
            ("lists", {}, "the generator returned generator for the seed .*; a task is a dict"),
            ("NUMBER", {}, r"make\.py: int is no function; a generator is `def int\(seed, \*\*args\) -> dict`"),
            ("summs", {}, r"make\.py has no 'summs'; did you mean 'sums'\?"),
        ],
    )
    def test_of_all_kinds(self, file, name, args, message):
        with pytest.raises(ConfigError, match=message):
            tasks(file, name, "train", args=args)

    def test_values_without_a_form(self):
        with pytest.raises(ConfigError, match=r"for the seed \d+ cannot be a task: the value of 'a' is a set"):
            rows_tasks(lambda seed: {"a": {1}}, "train", 0, "x")

    def test_too_few_different_tasks(self):
        with pytest.raises(ConfigError, match=r"made no task of the split '(train|dev|hidden)' in 2000 calls"):
            for split in SPLITS:
                rows_tasks(lambda seed: {"n": 1}, split, 0, "x")

    def test_a_share_of_nothing(self, file):
        with pytest.raises(ConfigError, match=r"tasks\.dev_share is 0"):
            tasks(file, "sums", "dev", dev_share=0)

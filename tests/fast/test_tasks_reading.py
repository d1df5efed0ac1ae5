"""Files, folders and data sets become rows, and what cannot be used is named by file and row."""

import datetime
import json
import re
import sys
from uuid import UUID

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.actors.tasks import open_tasks, rows_tasks
from headrace.actors.tasks.reading import read_path
from headrace.actors.tasks.rows import Rows
from headrace.actors.tasks.values import plain
from headrace.platform.config import TasksConfig
from headrace.platform.errors import ConfigError

ROWS = [{"prompt": f"{n} + {n}", "answer": str(2 * n)} for n in range(60)]


def write(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def all_rows(path, limit=0):
    (rows,) = read_path(path, limit).values()
    return [rows[index] for index in range(len(rows))]


def saved(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


class TestKinds:
    def test_json_lines(self, tmp_path):
        file = tmp_path / "rows.jsonl"
        file.write_bytes(b'\xef\xbb\xbf{"b": 1, "a": [1, null, true]}\r\n\n{"b": 2.5}\n')
        assert all_rows(file) == [{"b": 1, "a": [1, None, True]}, {"b": 2.5}]
        (rows,) = read_path(file).values()
        assert [rows.where(index) for index in range(2)] == [f"{file}:1", f"{file}:3"]

    def test_parquet(self, tmp_path):
        rows = [{"day": datetime.date(2024, 5, n + 1), "x": [n, n], "in": {"k": n}, "none": None} for n in range(5)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
        read = all_rows(tmp_path / "rows.parquet")
        assert read == [{"day": f"2024-05-0{n + 1}", "x": [n, n], "in": {"k": n}, "none": None} for n in range(5)]

    def test_a_folder_is_read_in_the_order_of_names(self, tmp_path):
        write(tmp_path / "b.jsonl", ROWS[2:4])
        pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "a.parquet")
        (tmp_path / "README.md").write_text("no rows")
        (tmp_path / ".hidden.jsonl").write_text("{")
        assert all_rows(tmp_path) == ROWS[:4]
        assert all_rows(tmp_path, limit=3) == ROWS[:3]

    def test_a_saved_data_set(self, tmp_path):
        assert all_rows(saved(tmp_path / "set", ROWS[:5])) == ROWS[:5]

    def test_the_splits_of_a_saved_data_set_are_ours(self, tmp_path):
        parts = {"train": ROWS[:40], "validation": ROWS[40:50], "test": ROWS[50:]}
        datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
            tmp_path / "set"
        )
        config = TasksConfig(source=str(tmp_path / "set"))
        for split, rows in (("train", ROWS[:40]), ("dev", ROWS[40:50]), ("hidden", ROWS[50:])):
            source = open_tasks(config, split, 0, "sums")
            assert sorted(task.data["prompt"] for task in source.next(len(rows))) == sorted(r["prompt"] for r in rows)

    def test_data_set_objects_and_lists(self):
        for rows in (ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS)):
            sources = [rows_tasks(rows, split, 0, "sums") for split in ("train", "dev", "hidden")]
            prompts = [task.data["prompt"] for source in sources for task in source.next(len(source))]
            assert sorted(prompts) == sorted(row["prompt"] for row in ROWS)

    def test_paths_start_from_the_base(self, tmp_path):
        write(tmp_path / "rows.jsonl", ROWS)
        assert len(rows_tasks("rows.jsonl", "train", 0, "sums", tmp_path)) > 30
        with pytest.raises(ConfigError, match="does not exist"):
            rows_tasks("rows.jsonl", "train", 0, "sums")

    def test_the_home_folder_is_known(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path / "rows.jsonl", ROWS)
        (tmp_path / "make.py").write_text("def f(seed): return {'n': seed}\n")
        for source in ("~/rows.jsonl", "~/make.py:f"):
            assert open_tasks(TasksConfig(source=source), "train", 0, "x").next(1)
            assert rows_tasks(source, "train", 0, "x", tmp_path / "elsewhere").next(1)

    def test_files_are_read_once_unless_they_change(self, tmp_path):
        file = write(tmp_path / "rows.jsonl", ROWS)
        first = read_path(file)[""]
        assert read_path(file)[""] is first
        write(file, ROWS[:7])
        assert len(read_path(file)[""]) == 7


def test_rows_are_held_compactly():
    rows = Rows()
    rows.begin("x")
    for n in range(2000):
        rows.add({"n": n, "text": "y" * 50}, n + 1)
    rows.close()
    held = sum(sys.getsizeof(getattr(rows, name)) for name in ("_data", "_ends", "_digests", "_lines", "_seeds"))
    assert held < 2000 * (70 + 70)
    assert rows[1999] == {"n": 1999, "text": "y" * 50}


def test_the_memory_of_repeats_ends_with_reading():
    rows = Rows()
    rows.begin("x")
    rows.add({"n": 1}, 1)
    assert not rows.close()._seen


class TestMistakes:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"a": 1}\n[1]\n', r"rows\.jsonl:2: not a JSON object"),
            ('{"a": 1}\n{"a": \n', r"rows\.jsonl:2: not a JSON object: "),
            ('{"a": NaN}\n', r"rows\.jsonl:1: not a JSON object"),
            ('{"a": 36893488147419103232}', r"rows\.jsonl:1: the value of 'a' is beyond 64 bits"),
            ('{"id": 1}\n{"id": 2}\n{"id": "1"}\n', r"rows\.jsonl:3: the id '1' is that of .*rows\.jsonl:1 too"),
            ('{"id": null}\n', r"rows\.jsonl:1: the id is None"),
            ('{"seed": -1}\n', r"rows\.jsonl:1: the seed is -1; .*2\*\*61"),
            ('{"seed": 2305843009213693952}\n', r"rows\.jsonl:1: the seed is 2305843009213693952"),
            ("\n\n", r"rows\.jsonl: there are no rows"),
        ],
    )
    def test_of_json_lines(self, tmp_path, content, message):
        (tmp_path / "rows.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=message):
            open_tasks(TasksConfig(source=str(tmp_path / "rows.jsonl")), "train", 0, "x")

    def test_text_that_is_none(self, tmp_path):
        (tmp_path / "rows.jsonl").write_bytes(b'{"a": "\xff"}\n')
        with pytest.raises(ConfigError, match=r"rows\.jsonl:1: not a JSON object"):
            read_path(tmp_path / "rows.jsonl")

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (b"x", r"rows\.parquet:1: the value of 'a' holds bytes"),
            (float("nan"), r"rows\.parquet:1: the value of 'a' is nan, .*write null"),
            (datetime.timedelta(1), r"rows\.parquet:1: the value of 'a' is a timedelta"),
        ],
    )
    def test_of_parquet(self, tmp_path, value, message):
        pq.write_table(pa.Table.from_pylist([{"a": value}]), tmp_path / "rows.parquet")
        with pytest.raises(ConfigError, match=message):
            read_path(tmp_path / "rows.parquet")

    def test_no_parquet(self, tmp_path):
        (tmp_path / "rows.parquet").write_text("{}")
        with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read as Parquet"):
            read_path(tmp_path / "rows.parquet")

    def test_of_paths(self, tmp_path):
        write(tmp_path / "sums.jsonl", ROWS)
        with pytest.raises(ConfigError, match=r"sum\.jsonl does not exist; did you mean .*/sums\.jsonl\?"):
            read_path(tmp_path / "sum.jsonl")
        (tmp_path / "rows.csv").write_text("a,b")
        with pytest.raises(ConfigError, match=r"rows\.csv is of no known kind; .*\.jsonl or \.parquet"):
            read_path(tmp_path / "rows.csv")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ConfigError, match=r"empty holds no \.jsonl or \.parquet file"):
            read_path(tmp_path / "empty")

    def test_a_data_set_needs_its_package(self, tmp_path, monkeypatch):
        saved(tmp_path / "set", ROWS[:5])
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ConfigError, match=re.escape("pip install 'headrace[datasets]'")):
            read_path(tmp_path / "set")

    def test_a_broken_data_set(self, tmp_path):
        saved(tmp_path / "set", ROWS[:5])
        (tmp_path / "set" / "state.json").write_text("{}")
        with pytest.raises(ConfigError, match="`datasets` cannot load it"):
            read_path(tmp_path / "set")

    @pytest.mark.parametrize("names", [["train", "extra"], ["dev"], ["train", "dev", "validation"]])
    def test_splits_that_nobody_knows(self, names):
        parts = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS[:3]) for name in names})
        with pytest.raises(ConfigError, match=r"split 'extra'; known|has no split 'train'|two splits that mean 'dev'"):
            rows_tasks(parts, "train", 0, "x")

    def test_a_streamed_data_set(self):
        stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
        with pytest.raises(ConfigError, match="save_to_disk"):
            rows_tasks(stream, "train", 0, "x")

    def test_rows_that_can_be_read_once_only(self):
        with pytest.raises(ConfigError, match="can be read only once; give a list"):
            rows_tasks(iter(ROWS), "train", 0, "x")
        assert len(rows_tasks(iter(ROWS), "dev", 0, "x", whole=True)) == 60

    @pytest.mark.parametrize(
        "source",
        [
            "https://example.org/rows.jsonl",
            "hf://datasets/o/n",
            "s3://b/rows.parquet",
            "owner/name",
            "openai/gsm8k_v1.1",
        ],
    )
    def test_nothing_is_downloaded(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=f"^{source} is not a file here, and headrace downloads .*save_to_disk"):
            open_tasks(TasksConfig(source=source), "train", 0, "x")
        with pytest.raises(ConfigError, match=f"^{source} is not a file here"):
            rows_tasks(source, "train", 0, "x", tmp_path)

    @pytest.mark.parametrize("source", ["data/rows.jsonl", "./data", "data", "a/b/c", "/data/rows.parquet"])
    def test_a_file_that_is_missing_is_missing(self, source, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match="does not exist"):
            open_tasks(TasksConfig(source=source), "train", 0, "x")

    def test_a_folder_that_looks_like_a_far_one_is_read(self, tmp_path, monkeypatch):
        (tmp_path / "owner/name").mkdir(parents=True)
        write(tmp_path / "owner/name/rows.jsonl", ROWS)
        monkeypatch.chdir(tmp_path)
        assert len(open_tasks(TasksConfig(source="owner/name"), "train", 0, "x")) > 30

    def test_tables_say_how_to_make_rows_of_them(self):
        pandas = pytest.importorskip("pandas")
        import pyarrow as pa

        for rows, message in (
            (pandas.DataFrame(ROWS), r'the rows of x are a DataFrame; .*df\.to_dict\("records"\)'),
            (pa.Table.from_pylist(ROWS), r"the rows of x are a Table; .*df\.to_pylist\(\)"),
            ({"prompt": ["a", "b"]}, r"the rows of x are a dict of columns; give a list of dicts"),
        ):
            with pytest.raises(ConfigError, match=message):
                rows_tasks(rows, "train", 0, "x")

    def test_of_lists(self):
        with pytest.raises(ConfigError, match="rows: there are no rows"):
            rows_tasks([], "train", 0, "x")
        with pytest.raises(ConfigError, match=r"rows:2: not a JSON object"):
            rows_tasks([{"a": 1}, "b"], "train", 0, "x")
        with pytest.raises(ConfigError, match=r"rows:1: the value of 'a\[1\]\.b' is a set"):
            rows_tasks([{"a": [0, {"b": {1}}]}], "train", 0, "x")


class TestValues:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (np.int64(3), 3),
            (np.float32(0.5), 0.5),
            (np.bool_(True), True),
            (np.str_("a"), "a"),
            (np.array([[1, 2]]), [[1, 2]]),
            ((1, (2,)), [1, [2]]),
            (datetime.datetime(2024, 1, 2, 3, 4), "2024-01-02T03:04:00"),
            (datetime.time(3, 4), "03:04:00"),
            (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        ],
    )
    def test_become_plain(self, value, expected):
        made = plain({"v": value})["v"]
        assert made == expected
        assert type(made) is type(expected)

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"a": 2**64}, "'a' is beyond 64 bits"),
            ({"a": {1: 2}}, "'a' has the key 1"),
            ({"a": "\ud800"}, "'a' holds a lone surrogate"),
            ({"\ud800": 1}, "the row holds a lone surrogate"),
            ({"a": [float("inf")]}, r"'a\[0\]' is inf"),
            ({"a": 1j}, "'a' is a complex"),
            ({"a": bytearray(b"")}, "'a' holds bytes"),
        ],
    )
    def test_or_are_refused_by_name(self, value, message):
        with pytest.raises(ValueError, match=message):
            plain(value)

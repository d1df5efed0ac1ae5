import pytest

from headrace.platform.errors import SchemaError
from headrace.platform.records import Fate, FateRow, Receipt, RewardKind, RewardRow
from headrace.platform.store.tables import FateTable, ReceiptTable, RewardTable


def reward(episode, value, **fields):
    return RewardRow(episode_id=episode, kind=RewardKind.OUTCOME, value=value, valid=value is not None, **fields)


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{tmp_path.name}"


def test_rows_of_all_writers_join_by_episode(root):
    RewardTable(root, "w0").append([reward("a", 1.0), reward("b", 0.0)])
    RewardTable(root, "w1").append([reward("a", None, turn=1), reward("c", 0.5)])
    table = RewardTable(root).by_episode()
    assert {key: [row.value for row in rows] for key, rows in table.items()} == {
        "a": [1.0, None],
        "b": [0.0],
        "c": [0.5],
    }
    assert RewardTable(root + "-other").rows() == []


def test_a_superseding_row_wins_whatever_the_order(root):
    RewardTable(root, "w0").append([reward("a", 1.0, grader_version="v2", supersedes="v1")])
    RewardTable(root, "w1").append([reward("a", 0.0, grader_version="v1"), reward("b", 0.0, grader_version="v1")])
    table = RewardTable(root).by_episode()
    assert [row.value for row in table["a"]] == [1.0]
    assert [row.value for row in table["b"]] == [0.0]


def test_superseding_is_per_kind_and_place(root):
    other = RewardRow(episode_id="a", kind=RewardKind.FORMAT, value=0.2, grader_version="v1")
    rows = [reward("a", 0.0, grader_version="v1"), reward("a", 0.3, turn=1, grader_version="v1"), other]
    RewardTable(root, "w").append([*rows, reward("a", 1.0, grader_version="v2", supersedes="v1")])
    assert sorted(row.value for row in RewardTable(root).by_episode()["a"]) == [0.2, 0.3, 1.0]


class TestComponentsOfOneKindAtOnePlace:
    """None is lost in any view, and none counts twice."""

    PLACES = ({}, {"turn": 1}, {"turn": 1, "span": (0, 3)}, {"grader_version": "judge-1"})

    @staticmethod
    def values(root):
        return [row.value for row in RewardTable(root).by_episode()["a"]]

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("values", [[0.2, 0.8], [0.5, 0.5, 0.5], [0.5, None, 0.5]])
    def test_all_are_kept(self, root, place, values):
        RewardTable(root, "w").append([reward("b", 1.0), *(reward("a", value, **place) for value in values)])
        assert self.values(root) == values

    def test_written_again_they_count_once(self, root):
        rows = [reward("a", 0.2), reward("b", 0.3), reward("a", 0.8), reward("a", 0.1, turn=1)]
        for _ in range(2):  # a disk that was full in between: see `Delivery`
            RewardTable(root, "w").append(rows)
        assert self.values(root) == [0.2, 0.8, 0.1]
        RewardTable(root, "w").append([reward("a", 0.4)])
        assert self.values(root) == [0.4, 0.1], "a later grade replaces all of the one before"

    def test_rows_that_were_read_are_written_as_they_are(self, root):
        RewardTable(root, "w").append([reward("a", 0.2), reward("a", 0.8)])
        rows = RewardTable(root).by_episode()["a"]
        RewardTable(root + "-copy", "w").append(rows)
        assert RewardTable(root + "-copy").by_episode() == {"a": rows}
        RewardTable(root + "-copy", "w").append(rows[1:])
        assert self.values(root + "-copy") == [0.8]

    def test_all_of_a_superseded_grader_are_left_out(self, root):
        RewardTable(root, "w").append([reward("a", value, grader_version="v1") for value in (0.2, 0.8)])
        RewardTable(root, "x").append(
            [reward("a", value, grader_version="v2", supersedes="v1") for value in (0.1, 0.4)]
        )
        assert self.values(root) == [0.1, 0.4]

    def test_one_that_a_crash_tore_leaves_the_others(self, tmp_path):
        RewardTable(str(tmp_path), "w").append([reward("a", value) for value in (0.2, 0.8)])
        file = tmp_path / "rewards" / "w.jsonl"
        file.write_bytes(file.read_bytes()[:-5])
        assert self.values(str(tmp_path)) == [0.2]
        RewardTable(str(tmp_path), "w").append([reward("a", value) for value in (0.2, 0.8)])
        assert self.values(str(tmp_path)) == [0.2, 0.8]


def test_the_last_fate_counts(root):
    table = FateTable(root, "learner")
    table.append([FateRow(episode_id="a", fate=Fate.TRAINED, version=5), FateRow(episode_id="b", fate=Fate.FAILED)])
    table.append([FateRow(episode_id="a", fate=Fate.IN_FLIGHT)])
    assert {key: row.fate for key, row in table.by_episode().items()} == {"a": Fate.IN_FLIGHT, "b": Fate.FAILED}


def test_receipts_are_all_kept(root):
    table = ReceiptTable(root, "learner")
    table.append([Receipt(episode_id="a", version=n, advantages=(0.5, -0.5)) for n in (1, 2)])
    assert [receipt.version for receipt in table.by_episode()["a"]] == [1, 2]


def test_a_torn_last_line_is_ignored_and_counted_and_never_joined_to_the_next(tmp_path):
    table = FateTable(str(tmp_path), "w")
    table.append([FateRow(episode_id="a", fate=Fate.TRAINED), FateRow(episode_id="b", fate=Fate.TRAINED)])
    file = tmp_path / "fates" / "w.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert list(table.by_episode()) == ["a"]
    assert table.torn_lines == 1
    FateTable(str(tmp_path), "w").append([FateRow(episode_id="c", fate=Fate.FAILED)])
    assert list(table.by_episode()) == ["a", "c"]
    assert table.torn_lines == 1


def test_a_line_torn_anywhere_is_counted(tmp_path):
    table = FateTable(str(tmp_path), "w")
    table.append([FateRow(episode_id="ä" * 3, fate=Fate.TRAINED)])
    file = tmp_path / "fates" / "w.jsonl"
    whole = file.read_bytes().rstrip(b"\n")
    for length in range(1, len(whole)):
        file.write_bytes(whole[:length])
        assert table.rows() == []
        assert table.torn_lines == 1, f"the first {length} bytes"


@pytest.mark.parametrize("line", [b'{"episode_id":"a"}\n', b'{"episode_id":"a","fate":"eaten"}\n', b"[]\n"])
def test_a_row_of_another_shape_is_refused(tmp_path, line):
    (tmp_path / "fates").mkdir()
    (tmp_path / "fates" / "w.jsonl").write_bytes(line)
    with pytest.raises(SchemaError, match=r"w\.jsonl, line 1: not a row of fates"):
        FateTable(str(tmp_path)).rows()


def test_a_newer_schema_is_refused(tmp_path):
    table = FateTable(str(tmp_path), "w")
    table.append([FateRow(episode_id="a", fate=Fate.TRAINED, schema_version=2)])
    with pytest.raises(SchemaError, match="schema 2; this build reads 1"):
        table.rows()


def test_a_reader_cannot_write(tmp_path):
    with pytest.raises(ValueError, match="can only be read"):
        FateTable(str(tmp_path)).append([FateRow(episode_id="a", fate=Fate.TRAINED)])

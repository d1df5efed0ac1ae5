import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from headrace.platform.errors import NotFound
from headrace.platform.records import AttemptId, Purpose, Role
from headrace.platform.records.codec import episode_codec
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn


def stored(group, version=0, **fields):
    episode = make_episode(group=group, version=version, **fields)
    return episode, episode_codec.encode(episode)


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{tmp_path.name}"


def test_payloads_come_back_byte_for_byte(root):
    store = EpisodeStore(root)
    batch = [stored(group) for group in range(5)]
    file = store.write(batch, "worker-0")
    assert file.startswith("episodes/version=000000/worker-0-")
    wanted = [3, 0, 4]
    payloads = EpisodeStore(root).read(file, [batch[i][0].episode_id for i in wanted])
    assert payloads == [batch[i][1] for i in wanted]


def test_mixed_versions_lie_in_the_oldest_folder(root):
    store = EpisodeStore(root)
    file = store.write([stored(0, 13), stored(1, 12)], "w")
    assert file.startswith("episodes/version=000012/")
    assert [e.version.number for e in store.iterate({"policy_version": 13})] == [13]


def test_a_restarted_worker_overwrites_nothing(root):
    files = {EpisodeStore(root).write([stored(group)], "w") for group in range(3)}
    assert len(files) == 3
    assert len(list(EpisodeStore(root).iterate())) == 3


def test_what_cannot_be_stored_is_refused(root):
    store = EpisodeStore(root)
    with pytest.raises(ValueError, match="nothing to store"):
        store.write([], "w")
    with pytest.raises(ValueError, match=r"not '\.\./w'"):
        store.write([stored(0)], "../w")


def test_read_names_what_is_missing(root):
    store = EpisodeStore(root)
    file = store.write([stored(0)], "w")
    with pytest.raises(NotFound, match=r"test-run\.t9\.0\.0"):
        store.read(file, ["test-run.t9.0.0"])
    with pytest.raises(NotFound):
        store.read("episodes/version=000077/none.parquet", ["test-run.t0.0.0"])


def test_find_by_unique_prefix(root):
    store = EpisodeStore(root)
    store.write([stored(1), stored(10), stored(2)], "w")
    store.write([stored(0, attempt_id=AttemptId("test-run", 1, 10)), stored(0, attempt_id=AttemptId("r", 1, 1))], "w")
    assert store.find("test-run.t2").dispatch_sequence == 2
    assert store.find("t10").dispatch_sequence == 10
    assert store.find("r.t1.1.0").episode_id == "r.t1.1.0"
    with pytest.raises(NotFound, match=r"fits 2 episodes: test-run\.t1\.0\.0, test-run\.t1\.10\.0"):
        store.find("test-run.t1.")
    with pytest.raises(NotFound, match=r"no episode 'test-run\.t3\.0\.0'; there are test-run\.t"):
        store.find("test-run.t3.0.0")
    with pytest.raises(NotFound, match="none is stored yet"):
        EpisodeStore(root + "-other").find("x")


def test_an_exact_id_wins_over_longer_ones(root):
    store = EpisodeStore(root)
    store.write([stored(0, attempt_id=AttemptId("a", 1, 0, n)) for n in (1, 10, 11)], "w")
    assert store.find("a.t1.0.1").attempt_id.attempt == 1


def test_iterate_filters_and_names_the_nearest_column(root):
    store = EpisodeStore(root)
    store.write([stored(0), stored(0, attempt_id=AttemptId("test-run", 0, 0, purpose=Purpose.EVAL))], "w")
    assert [e.purpose for e in store.iterate({"purpose": "eval", "group": 0})] == [Purpose.EVAL]
    with pytest.raises(ValueError, match="did you mean 'purpose'"):
        list(store.iterate({"purpos": "eval"}))


def test_compaction_keeps_payloads_and_old_paths(root):
    store = EpisodeStore(root)
    batches = {store.write([stored(group, 4)], f"w{group % 2}"): stored(group, 4) for group in range(4)}
    other = store.write([stored(9, 5)], "w")
    merged = store.compact(4)
    assert merged is not None
    assert store.compact(4) is None
    for file, (episode, payload) in batches.items():
        assert store.read(file, [episode.episode_id]) == [payload]
        assert store.read(merged, [episode.episode_id]) == [payload]
    assert store.read(other, ["test-run.t9.0.0"]) == [stored(9, 5)[1]]
    assert sorted(e.dispatch_sequence for e in store.iterate()) == [0, 1, 2, 3, 9]


def test_an_interrupted_compaction_shows_rows_once(tmp_path):
    store = EpisodeStore(str(tmp_path))
    files = [store.write([stored(group)], "w") for group in range(2)]
    kept = {file: (tmp_path / file).read_bytes() for file in files}
    store.compact(0)
    for file, data in kept.items():
        (tmp_path / file).write_bytes(data)
    assert len(list(store.iterate())) == 2
    store.compact(0)
    assert len(list((tmp_path / "episodes").rglob("*.parquet"))) == 1
    assert len(list(store.iterate())) == 2


CRASH = """
import os, pathlib, sys
pathlib.Path.replace = lambda *_: os._exit(9)
from headrace.platform.records.codec import episode_codec
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.testing.episodes import make_episode
episode = make_episode()
EpisodeStore(sys.argv[1]).write([(episode, episode_codec.encode(episode))], "w")
"""


def test_a_crash_before_the_rename_leaves_nothing_readable(tmp_path):
    died = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], check=False)
    assert died.returncode == 9
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".tmp"]
    store = EpisodeStore(str(tmp_path))
    assert list(store.iterate()) == []
    store.write([stored(1)], "w")
    assert ds.dataset(tmp_path / "episodes", partitioning="hive").count_rows() == 1


def test_an_error_while_writing_leaves_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        EpisodeStore(str(tmp_path)).write([stored(0)], "w")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_people_can_read_it(tmp_path):
    turns = (plain_turn(Role.USER, "hi", (1, 2)), policy_turn("yes", (4, 5, 6), version=3))
    EpisodeStore(str(tmp_path)).write([stored(7, 3, turns=turns, final_state_hash="abc"), stored(8, 3)], "w")
    table = ds.dataset(tmp_path / "episodes", partitioning="hive").to_table()
    row = table.to_pylist()[0]
    assert row["version"] == row["policy_version"] == 3
    assert (row["group"], row["turns"], row["action_tokens"], row["final_state_hash"]) == (7, 2, 3, "abc")
    assert row["messages"] == '[{"role":"user","content":"hi"},{"role":"assistant","content":"yes"}]'
    assert row["token_ids"] == [1, 2, 4, 5, 6]
    assert row["action_mask"] == [0, 0, 1, 1, 1]
    assert row["behaviour_logprobs"] == [0, 0, -0.5, -0.5, -0.5]
    assert pq.read_table(tmp_path / "episodes").num_rows == 2
    if find_spec("pandas"):
        assert len(table.to_pandas()) == 2

"""Reward rows as they are written: each file is read on from where the last look ended."""

from itertools import pairwise

import pytest

from headrace.platform.records.status import RewardKind
from headrace.platform.records.tables import RewardRow
from headrace.platform.store.reward_feed import RewardFeed
from headrace.platform.store.tables import RewardTable


def row(episode: str, value: float, **more) -> RewardRow:
    return RewardRow(episode_id=episode, kind=RewardKind.OUTCOME, value=value, **more)


@pytest.fixture(params=["disk", "memory"])
def root(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}-feed"


def test_rows_of_all_writers_are_found_as_they_come(root):
    feed, one, other = RewardFeed(root), RewardTable(root, "rollout-0"), RewardTable(root, "rollout-1")
    assert feed.take(["a"]) == {}
    one.append([row("a", 1.0), row("b", 2.0)])
    assert feed.take(["a"]) == {"a": [row("a", 1.0)]}
    other.append([row("c", 3.0)])
    one.append([row("d", 4.0)])
    assert feed.take(["b", "c", "d", "nowhere"]) == {"b": [row("b", 2.0)], "c": [row("c", 3.0)], "d": [row("d", 4.0)]}
    assert feed.take(["a", "b"]) == {"a": [row("a", 1.0)], "b": [row("b", 2.0)]}  # asked again


def test_what_counts_is_what_the_table_says(root):
    feed, table = RewardFeed(root), RewardTable(root, "rollout-0")
    table.append([row("a", 1.0, grader_version="1"), row("a", 5.0, grader_version="1")])
    table.append([row("a", 2.0, grader_version="2", supersedes="1")])
    assert (
        feed.take(["a"]) == {"a": table.by_episode()["a"]} == {"a": [row("a", 2.0, grader_version="2", supersedes="1")]}
    )


def test_half_a_line_is_read_when_it_is_whole(tmp_path):
    table = RewardTable(str(tmp_path), "rollout-0")
    table.append([row("a", 1.0), row("b", 2.0)])
    file = tmp_path / "rewards" / "rollout-0.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    feed = RewardFeed(str(tmp_path))
    assert set(feed.take(["a", "b"])) == {"a"}
    file.write_bytes(whole)
    assert set(feed.take(["b"])) == {"b"}


def test_nothing_is_read_twice(tmp_path, monkeypatch):
    table, feed = RewardTable(str(tmp_path), "rollout-0"), RewardFeed(str(tmp_path))
    read, cat_ranges = [], feed._fs.cat_ranges

    def noted(files, starts, ends, **how):
        read.extend(zip(starts, ends, strict=True))
        return cat_ranges(files, starts, ends, **how)

    monkeypatch.setattr(feed._fs, "cat_ranges", noted)
    for n in range(3):
        table.append([row(f"e{n}", float(n))])
        assert set(feed.take([f"e{n}"])) == {f"e{n}"}
    assert len(read) == 3
    assert all(end == start for (_, end), (start, _) in pairwise(read))

"""Folders that appear whole or not at all, and targets that are refused before any work."""

import os
from pathlib import Path

import pytest

from headrace.deploy.new_folder import cached_folder, check_new_folder, new_folder
from headrace.platform.errors import ConfigError, RunFailed


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def fill(folder: Path) -> None:
    (folder / "a").write_text("mine")


def test_it_appears_at_the_end(tmp_path):
    target = tmp_path / "deep" / "down"
    with new_folder(target) as working:
        fill(working)
        assert not target.exists()
    assert (target / "a").read_text() == "mine"
    assert names_in(target.parent) == ["down"]


@pytest.mark.parametrize("make", [new_folder, cached_folder])
def test_an_error_leaves_nothing(make, tmp_path):
    with pytest.raises(KeyError), make(tmp_path / "out") as working:
        fill(working)
        raise KeyError
    assert names_in(tmp_path) == []


def wrong_targets(folder: Path) -> list[tuple[Path, str]]:
    (folder / "file").write_text("")
    (folder / "there").mkdir()
    (folder / "nowhere").symlink_to(folder / "gone")
    return [
        (folder / "there", "exists already"),
        (folder / "nowhere", "exists already"),
        (folder / "file" / "out", "file is no folder"),
        (folder / "file" / "deep" / "out", "file is no folder"),
        (folder / "nowhere" / "out", "nowhere is no folder"),
        (folder / ("x" * 300), "cannot be made"),
    ]


@pytest.mark.parametrize("index", range(6))
def test_a_target_that_cannot_be_made_is_refused_before_the_work(index, tmp_path):
    target, named = wrong_targets(tmp_path)[index]
    with pytest.raises(ConfigError, match=named), new_folder(target):
        pytest.fail("the work began")


def test_a_folder_that_nobody_may_write_in_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=rf"nothing may be written in {tmp_path}"):
        check_new_folder(tmp_path / "deep" / "out")


def test_a_place_that_refuses_folders_is_named():
    with pytest.raises(ConfigError, match="/proc/out cannot be made"), new_folder(Path("/proc/out")):
        pytest.fail("the work began")


def test_where_the_target_appears_meanwhile_the_result_is_kept_beside(tmp_path):
    target = tmp_path / "out"
    with (
        pytest.raises(RunFailed, match=r"appeared while .* the result is in ") as caught,
        new_folder(target) as working,
    ):
        fill(working)
        target.mkdir()
    kept = Path(str(caught.value).rpartition(" ")[2])
    assert (kept / "a").read_text() == "mine" and kept.parent == tmp_path
    assert names_in(target) == [] and len(names_in(tmp_path)) == 2


def test_in_a_cache_whoever_was_faster_stays(tmp_path):
    target = tmp_path / "key"
    with cached_folder(target) as working:
        fill(working)
        target.mkdir()
        (target / "a").write_text("theirs")
    assert (target / "a").read_text() == "theirs" and names_in(tmp_path) == ["key"]

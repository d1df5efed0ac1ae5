"""`headrace env new` writes environments that work as they are."""

import subprocess
import sys

import pytest

from headrace.deploy.environment_check import Outcome, check_environment
from headrace.deploy.new_environment import DoorName, write_environment
from headrace.platform.errors import ConfigError


@pytest.mark.parametrize("door", DoorName)
def test_what_is_written_passes_every_check(tmp_path, door):
    target, files = write_environment("word_game", door, tmp_path / "games")
    assert target == f"{tmp_path}/games/word_game.py:WordGame"
    assert sorted(path.name for path in files) == sorted(
        {DoorName.REWARD: ["word_game.py", "word_game.jsonl"]}.get(door, ["word_game.py"])
    )
    report = check_environment(target)
    assert [finding for finding in report.findings if finding.outcome is Outcome.FAILED] == []
    assert report.count(Outcome.OK) >= 24


@pytest.mark.parametrize("door", DoorName)
@pytest.mark.parametrize("command", [("check", "--select", "E,F,W,I,UP,B,SIM,RET,PIE,PTH,N"), ("format", "--check")])
def test_what_is_written_is_clean(tmp_path, door, command):
    write_environment("word_game", door, tmp_path)
    ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "--line-length", "120"]
    ended = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("name", ["word_game", "WordGame", "word-game"])
def test_a_name_is_that_of_a_module_and_an_object(tmp_path, name):
    target, _ = write_environment(name, DoorName.ENVIRONMENT, tmp_path)
    assert target.endswith("/word_game.py:WordGame")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1st", "cannot be the name"),
        ("word game", "cannot be the name"),
        ("../word_game", "cannot be the name"),
        ("wörter", "cannot be the name"),
        ("class", "cannot be the name"),
        ("", "cannot be the name"),
        ("random", "would hide the module"),
        ("headrace", "would hide the module"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        write_environment(name, DoorName.REWARD, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    mine = tmp_path / "word_game.jsonl"
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"word_game\.jsonl is there already"):
        write_environment("word_game", DoorName.REWARD, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["word_game.jsonl"]
    assert mine.read_text() == "mine"

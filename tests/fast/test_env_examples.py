"""The examples are as short as they promise, sound, and trained on what they say. That they train is tested apart."""

import importlib.util
import json
from pathlib import Path

import pytest

from headrace.actors.demonstrations.chats import read_chats
from headrace.actors.environments.registry import environment_kind
from headrace.actors.rendering import load_renderer
from headrace.deploy.cli.options import recipes_dir
from headrace.deploy.environment_check import Outcome, check_environment
from headrace.deploy.vocabulary import vocabulary_files
from headrace.platform.config.load import load_recipe

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LONGEST = {"reward/brackets.py": 10, "tools/shop.py": 25, "environment/courier.py": 60}
TARGETS = {"reward": "brackets.py:Brackets", "tools": "shop.py:Shop", "environment": "courier.py:Courier"}


def target(folder):
    return f"{EXAMPLES / folder}/{TARGETS[folder]}"


@pytest.mark.parametrize("file", LONGEST)
def test_an_example_is_short(file):
    lines = [line.strip() for line in (EXAMPLES / file).read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= LONGEST[file]


@pytest.mark.parametrize("folder", TARGETS)
def test_an_example_passes_every_check(folder):
    report = check_environment(target(folder))
    assert [finding for finding in report.findings if finding.outcome is Outcome.FAILED] == []
    assert report.count(Outcome.OK) >= 24


@pytest.mark.parametrize("folder", TARGETS)
def test_a_recipe_plays_its_example(folder):
    config = load_recipe(str(EXAMPLES / folder / "recipe.yaml"), [], recipes_dir())
    assert config.environments[0].name == target(folder)
    assert config.sft.stages[0].data == str(EXAMPLES / folder / "chats.jsonl")


@pytest.mark.parametrize("folder", TARGETS)
def test_the_data_is_what_the_script_makes(folder):
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLES / "make_data.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, rows in script.made(folder).items():
        assert [json.loads(line) for line in (EXAMPLES / folder / name).read_text().splitlines()] == rows


def test_no_chat_closes_brackets_that_are_trained_or_evaluated_on():  # case V2
    asked = {chat.messages[0].content for chat in read_chats(EXAMPLES / "reward" / "chats.jsonl")}
    for split in ("train", "dev", "hidden"):
        tasks = environment_kind(target("reward")).tasks(split, 0, {}).next(300)
        assert asked.isdisjoint(task.data["prompt"] for task in tasks)


def test_the_chats_show_the_tools_as_the_environment_does(tmp_path):
    """Otherwise the model would start from prompts that it never meets."""
    for name, data in vocabulary_files("bytes", [], 0).items():
        (tmp_path / name).write_bytes(data)
    renderer = load_renderer(tmp_path)
    session = environment_kind(target("tools")).environment({})
    for chat in read_chats(EXAMPLES / "tools" / "chats.jsonl"):
        assert renderer.render(chat.messages[:1], chat.tools) == renderer.render(chat.messages[:1], session.tools())

"""Every shipped recipe loads, plans and starts nothing while it does."""

import json
import subprocess
import sys

import pytest
import yaml
from command_line import call_main, run
from run_kit import RECIPES

from headrace.actors.worlds import Worlds
from headrace.platform.config import RunConfig
from headrace.platform.config.load import dump_yaml, known_recipes, load_recipe

NAMES = known_recipes(RECIPES)


def test_the_promised_recipes_are_shipped():
    assert {"lookup", "lookup-slow"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_its_worlds_can_be_built(name):
    config = load_recipe(name, [], RECIPES)
    assert config.name == name
    for split in ("train", config.eval.split):
        worlds = Worlds(config.environments, split, config.seed)
        assert worlds.setting(0).task.environment in {environment.name for environment in config.environments}


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_prints_a_plan_that_loads_to_the_same_run(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call_main(monkeypatch, "train", name, "learner.lr=2.5e-4", "seed=7", "--dry-run") == 0
    plan = tmp_path / "plan.yaml"
    plan.write_text(capsys.readouterr().out)
    config = load_recipe(str(plan), [], RECIPES)
    assert (config.learner.lr, config.seed) == (2.5e-4, 7)
    assert config == load_recipe(name, ["learner.lr=2.5e-4", "seed=7"], RECIPES)
    assert dump_yaml(config) == plan.read_text()
    assert list(tmp_path.iterdir()) == [plan], "a dry run starts nothing and leaves nothing"


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_as_json_ends_with_the_plan(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call_main(monkeypatch, "train", name, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert RunConfig.model_validate(plan) == load_recipe(name, [], RECIPES)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_shows_the_options_as_settings(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    url = "redis://:${env:SOME_PASSWORD}@server:6379/0"
    args = ("--ray-address", "head:6379", "--redis-url", url, "--dry-run")
    assert call_main(monkeypatch, "train", "lookup", *args) == 0
    plan = yaml.safe_load(capsys.readouterr().out)
    assert plan["runtime"]["ray_address"] == "head:6379"
    assert plan["queue"]["redis_url"] == url, "secrets stay references"


def test_plans_and_help_load_nothing_heavy(tmp_path):
    script = (
        "import sys; from headrace.deploy.cli import app\n"
        "for args in (['train', 'lookup', '--dry-run'], ['--help'], ['inspect', '--help']):\n"
        "    app(args, standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'transformers', 'pyarrow', 'matplotlib', 'redis'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_the_entry_point_is_a_command(tmp_path):
    code, out, _ = run(tmp_path, "--version", timeout_s=60)
    assert code == 0
    assert out.startswith("headrace ")

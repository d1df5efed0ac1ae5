"""The base model: given, trained here, or found in the cache, which holds whole results only."""

import json

import pytest
from run_kit import RECIPES

from headrace.actors.environments.lookup import LookupEnvironment
from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.deploy.base_model import SftStep, cache_folder, prepare_base_model
from headrace.platform.config import RunConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError, RunFailed
from headrace.trainer.model import load_folder

TWO_STAGES = (
    "sft.stages=[{name: first, max_steps: 2, batch: 4, measure_every: 1, measure_tasks: 4},"
    " {name: second, max_steps: 3, batch: 4, guess_share: 0.75}]"
)


def recipe(tmp_path, *changes: str) -> RunConfig:
    return load_recipe("lookup", [TWO_STAGES, f"sft.cache_dir={tmp_path}", *changes], RECIPES)


def ignore(step: SftStep) -> None:
    pass


def cached_folders(tmp_path) -> list:
    return sorted((tmp_path / "sft").iterdir())


def test_a_given_folder_is_used_as_it_is(lookup_model, tmp_path):
    config = load_recipe("lookup", [f"model.path={lookup_model}", "model.tiny_llama=null", "sft=null"], RECIPES)
    base = prepare_base_model(config, ignore)
    assert (base.path, base.cached, base.stages) == (lookup_model, True, ())


def test_stages_run_in_order_and_report_every_step(tmp_path):
    steps: list[SftStep] = []
    base = prepare_base_model(recipe(tmp_path), steps.append)
    assert [(step.stage, step.step, step.max_steps) for step in steps if step.success is None or step.stage] != []
    assert [step.step for step in steps if step.stage == "second"][-1] == 3
    assert [(stage["stage"], stage["steps"]) for stage in base.stages] == [("first", 2), ("second", 3)]
    assert all(0 <= stage["success"] <= 1 for stage in base.stages)
    load_folder(base.path)


def test_the_second_time_is_cached(tmp_path):
    first = prepare_base_model(recipe(tmp_path), ignore)
    second = prepare_base_model(recipe(tmp_path), lambda step: pytest.fail("a cached stage ran"))
    assert (first.cached, second.cached) == (False, True)
    assert (first.path, first.stages) == (second.path, second.stages)
    assert cached_folders(tmp_path) == [first.path]


def test_the_same_seed_gives_the_same_weights(tmp_path):
    twins = [prepare_base_model(recipe(tmp_path / name), ignore).path for name in "ab"]
    assert (twins[0] / "model.safetensors").read_bytes() == (twins[1] / "model.safetensors").read_bytes()


KEYED = {
    "seed": "seed=1",
    "stage": "sft.stages.second.lr=1e-4",
    "model": "model.tiny_llama.layers=3",
    "environment": "environments.0.args.hops=[1]",
    "budget": "environments.0.budgets.max_turns=3",
}
NOT_KEYED = {
    "learner": "learner.lr=1e-5",
    "queue": "queue.max_lag=0",
    "runs": "runs_dir=elsewhere",
    "name": "name=other",
    "runtime": "runtime.kind=inprocess",
}


@pytest.mark.parametrize("change", KEYED.values(), ids=KEYED)
def test_the_key_covers_what_the_result_depends_on(change, tmp_path):
    assert cache_folder(recipe(tmp_path, change)) != cache_folder(recipe(tmp_path))


@pytest.mark.parametrize("change", NOT_KEYED.values(), ids=NOT_KEYED)
def test_the_key_ignores_what_comes_later(change, tmp_path):
    assert cache_folder(recipe(tmp_path, change)) == cache_folder(recipe(tmp_path))


class TestWholeOrNothing:
    def test_interrupted_stages_leave_nothing(self, tmp_path):
        def interrupt(step: SftStep) -> None:
            if step.stage == "second":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare_base_model(recipe(tmp_path), interrupt)
        assert cached_folders(tmp_path) == []
        assert not prepare_base_model(recipe(tmp_path), ignore).cached

    def test_a_missed_gate_is_named_and_not_cached(self, tmp_path):
        config = recipe(tmp_path, "sft.stages.first.until_success=1.0")
        with pytest.raises(RunFailed, match="first"):
            prepare_base_model(config, ignore)
        assert cached_folders(tmp_path) == []

    def test_two_at_once_agree(self, tmp_path):
        """Another process finishes the same stages first: its folder stays, ours goes."""
        config = recipe(tmp_path)
        others: list = []

        def meanwhile(step: SftStep) -> None:
            if not others:
                others.append(None)
                others[0] = prepare_base_model(config, ignore)

        base = prepare_base_model(config, meanwhile)
        assert base.path == others[0].path
        assert cached_folders(tmp_path) == [base.path]

    def test_a_folder_without_its_stages_file_is_not_a_result(self, tmp_path):
        config = recipe(tmp_path)
        base = prepare_base_model(config, ignore)
        assert json.loads((base.path / "stages.json").read_text())


class Unscored(LookupEnvironment):
    name = "unscored"

    async def _reset(self, task, seed):
        raise RuntimeError("the store is on fire")


class TestAWorldThatFails:
    def register(self, monkeypatch, **parts):
        kind = EnvironmentKind(environment=lambda args: Unscored(), tasks=ENVIRONMENTS["lookup"].tasks, **parts)
        monkeypatch.setitem(ENVIRONMENTS, "unscored", kind)

    def test_its_failures_are_no_measurement(self, tmp_path, monkeypatch):
        lookup = ENVIRONMENTS["lookup"]
        self.register(monkeypatch, demonstrations=lookup.demonstrations, tokenizer_files=lookup.tokenizer_files)
        with pytest.raises(RunFailed, match="the store is on fire"):
            prepare_base_model(recipe(tmp_path, "environments.0.name=unscored"), ignore)
        assert cached_folders(tmp_path) == []

    def test_without_a_vocabulary_there_is_no_tiny_model(self, tmp_path, monkeypatch):
        self.register(monkeypatch)
        with pytest.raises(ConfigError, match=r"model\.path"):
            prepare_base_model(recipe(tmp_path, "environments.0.name=unscored"), ignore)

    def test_without_demonstrations_there_are_no_stages(self, tmp_path, monkeypatch):
        self.register(monkeypatch, tokenizer_files=ENVIRONMENTS["lookup"].tokenizer_files)
        with pytest.raises(ConfigError, match="no demonstrations"):
            prepare_base_model(recipe(tmp_path, "environments.0.name=unscored"), ignore)

"""`learner.algorithm` in a recipe: which one is meant, and what is refused."""

from pathlib import Path

import pytest

from headrace.deploy.checks import check_learner
from headrace.deploy.context import RunContext
from headrace.platform.config import GigpoConfig, GrpoConfig, LearnerConfig, PpoConfig, ReinforceConfig, RlooConfig
from headrace.platform.config.load import load_recipe
from headrace.platform.errors import ConfigError

RECIPES = Path(__file__).resolve().parents[2] / "deploy" / "recipes"


def algorithm(*overrides: str):
    return load_recipe("lookup", list(overrides), RECIPES).learner.algorithm


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grpo", GrpoConfig),
        ("rloo", RlooConfig),
        ("reinforce", ReinforceConfig),
        ("gigpo", GigpoConfig),
        ("ppo", PpoConfig),
    ],
)
def test_the_name_says_which_one(name, kind):
    assert type(algorithm(f"learner.algorithm.name={name}")) is kind


def test_without_a_name_it_is_grpo():
    assert algorithm("learner.algorithm={group_size: 4}") == GrpoConfig(group_size=4)
    assert LearnerConfig().algorithm == GrpoConfig()


def test_defaults_are_the_plain_ones():
    """A recipe of before means what it meant: clip at 0.2 and 0.28, mean over tokens, nothing added."""
    config = GrpoConfig()
    assert (config.group_size, config.clip_low, config.clip_high, config.epsilon) == (8, 0.2, 0.28, 1e-4)
    assert (config.scale, config.ratio, config.aggregation, config.entropy) == ("std", "token", "token", 0.0)
    assert (config.kl.coefficient, config.correction.kind, config.correction.keep) == (0.0, "clip", None)
    assert config.returns.plain


def test_a_resolved_configuration_is_read_back_as_it_was():
    config = LearnerConfig(
        algorithm=RlooConfig(returns={"credit": "to_go", "gamma": 0.9}, correction={"keep": [0.5, 2]})
    )
    assert LearnerConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["learner.algorithm.name=rlo"], "learner.algorithm.name: expected 'grpo', 'rloo', 'reinforce'"),
        (["learner.algorithm={name: grpo, group_size: 1}"], "learner.algorithm.group_size"),
        (["learner.algorithm={name: reinforce, group_size: 1}"], "leaves nothing to learn; use baseline=running"),
        (["learner.algorithm={name: reinforce, group_size: 1, baseline: none}"], "queue.min_group=2 is larger"),
        (["learner.algorithm.returns.credit=to_go"], "grpo compares whole episodes"),
        (["learner.algorithm={name: gigpo, returns: {credit: to_go}}"], "gigpo compares whole episodes"),
        (["learner.algorithm={name: ppo, returns: {credit: to_go}}"], "ppo credits by gae.over and gae.gamma"),
        (["learner.algorithm={name: ppo, returns: {gamma: 0.9}}"], "ppo credits by gae.over and gae.gamma"),
        (["learner.algorithm.returns.shaping=true"], "returns.shaping=true changes nothing for grpo"),
        (
            ["learner.algorithm={name: ppo, returns: {shaping: true}, gae: {over: token, gamma: 0.9}}"],
            "returns.shaping discounts by turns",
        ),
        (["learner.algorithm={name: ppo, group_size: 1}"], "queue.min_group=2 is larger"),
        (["learner.algorithm={name: ppo, gae: {over: episode}}"], "learner.algorithm.gae.over"),
        (["learner.algorithm.correction.keep=[2, 3]"], "must hold 1"),
        (["learner.algorithm.kl.kind=k4"], "learner.algorithm.kl.kind"),
        (["learner.algorithm.name=branch"], "  - learner.algorithm: group_size=8, but points=2 times continuations=3"),
        (["learner.algorithm.name=branch"], "set learner.algorithm.group_size=7"),
        (["learner.lora=4"], "learner.lora: expected a section; got 4"),
        (["learner.betas=[2, 0.5]"], "learner.betas.0"),
        (
            ["learner.algorithm={name: rloo, epsilon: 1}"],
            "learner.algorithm.epsilon: unknown key; it is an option of name: ",
        ),
    ],
)
def test_what_is_wrong_is_named(overrides, line):
    with pytest.raises(ConfigError) as caught:
        algorithm(*overrides)
    assert line in str(caught.value)


def test_more_ranks_than_the_backend_has_are_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"learner\.ranks=2"):
        check_learner(load_recipe("lookup", ["learner.ranks=2"], RECIPES))


def test_a_critic_beside_ranks_is_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match=r"the critic of ppo is held by learner\.backend=torch alone"):
        check_learner(load_recipe("lookup", ["learner.algorithm.name=ppo", "learner.backend=deepspeed"], RECIPES))


def test_one_episode_a_group_is_enough_for_a_critic() -> None:
    config = load_recipe("lookup", ["learner.algorithm={name: ppo, group_size: 1}", "queue.min_group=1"], RECIPES)
    assert (config.learner.algorithm.group_size, config.learner.algorithm.needs_variance) == (1, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["learner.algorithm={name: ppo, critic: {warmup: 40}}"], r"leaves none of learner\.steps=40 to the policy"),
        (["learner.device=cuda"], r"learner\.device=cuda needs a GPU.*learner\.device=cpu"),
    ],
)
def test_what_could_not_learn_is_refused_before_a_run(changes, words, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=words):
        check_learner(load_recipe("lookup", changes, RECIPES))


def test_the_queue_keeps_groups_of_equal_scores_where_they_teach_something(tmp_path) -> None:
    for change, drops in (
        ("name: grpo", True),
        ("name: reinforce, baseline: none", False),
        ("name: grpo, returns: {cost: 0.1}", False),
        ("name: rloo, returns: {credit: to_go, shaping: true}", False),
        ("name: gigpo", False),
        ("name: gigpo, step_weight: 0", True),
        ("name: ppo", False),
    ):
        config = load_recipe("lookup", [f"learner.algorithm={{{change}}}"], RECIPES)
        assert RunContext(run="r", root=str(tmp_path), config=config).limits.drop_zero_variance is drops

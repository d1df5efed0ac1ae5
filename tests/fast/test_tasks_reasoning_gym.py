"""`reasoning_gym:NAME` as a source of tasks, as an environment and as a scorer."""

import sys

import numpy as np
import pytest

from headrace.actors.environments.registry import environment_kind
from headrace.actors.scoring.process import ScorerProcess
from headrace.actors.tasks import open_tasks
from headrace.actors.tasks.reasoning_gym import ReasoningGymScorer, reasoning_gym_kind
from headrace.actors.worlds import Worlds
from headrace.platform.config import EnvironmentConfig, TasksConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import Message, Role, Turn
from headrace.platform.testing.conformance.support import survives_json
from headrace.platform.testing.episodes import make_episode


def source(name, split="train", **args):
    return open_tasks(TasksConfig(source=f"reasoning_gym:{name}", args=args), split, 0, name)


def answered(text, task):
    """An episode that ends with `text`."""
    empty = np.empty(0)
    turn = Turn(
        role=Role.ASSISTANT,
        token_ids=empty.astype(np.int32),
        action_mask=empty.astype(np.uint8),
        behaviour_logprobs=empty.astype(np.float32),
        content=text,
    )
    return make_episode(task=task, turns=(turn,))


def score(name, text, task):
    (component,) = ReasoningGymScorer(name).score(task, answered(text, task))
    return component


class TestTasks:
    def test_are_the_same_for_a_position_and_apart_by_split(self):
        assert source("chain_sum").next(5) == source("chain_sum").next(5)
        made = [source("chain_sum", split).next(10) for split in ("train", "dev", "hidden")]
        assert len({task.data["prompt"] for part in made for task in part}) == 30
        assert len({task.seed for part in made for task in part}) == 30
        assert all(0 < task.seed < 2**32 for part in made for task in part), "some generators seed numpy"

    def test_settings_reach_the_generator_and_its_scorer(self):
        (task,) = source("chain_sum", min_terms=7, max_terms=7).next(1)
        assert task.data["metadata"]["num_terms"] == 7
        assert task.data["config"] == {"min_terms": 7, "max_terms": 7}
        assert score("chain_sum", task.data["answer"], task).value == 1.0

    @pytest.mark.parametrize(
        ("name", "args", "message"),
        [
            ("chain_sums", {}, r"reasoning_gym has no generator 'chain_sums'; did you mean chain_sum"),
            ("chain_sum", {"min_term": 1}, r"has no setting 'min_term'; did you mean 'min_terms'\?"),
            ("chain_sum", {"min_terms": -1}, "refuses its settings"),
        ],
    )
    def test_mistakes_are_named(self, name, args, message):
        with pytest.raises(ConfigError, match=message):
            source(name, **args)

    def test_the_package_is_an_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(ConfigError, match=r"pip install 'headrace\[reasoning-gym\]'"):
            reasoning_gym_kind("chain_sum")


class TestScores:
    def test_tags_or_the_whole_text(self):
        (task,) = source("chain_sum").next(1)
        answer = task.data["answer"]
        assert score("chain_sum", answer, task).value == 1.0
        assert score("chain_sum", f"It is 7 ... <answer> {answer} </answer>", task).value == 1.0
        wrong = score("chain_sum", "nothing", task)
        assert (wrong.value, wrong.valid, wrong.evidence) == (0.0, True, "answered 'nothing'")

    def test_a_text_that_cannot_be_read_is_a_wrong_answer(self):
        (task,) = source("prime_factorization").next(1)
        wrong = score("prime_factorization", "I do not know", task)
        assert (wrong.value, wrong.valid) == (0.0, True)
        assert "cannot be read: ValueError" in wrong.evidence

    def test_a_grader_that_cannot_read_its_own_answer_raises(self):
        (task,) = source("prime_factorization").next(1)
        task.data["answer"] = "no factors"
        with pytest.raises(ValueError, match="invalid literal"):
            score("prime_factorization", "I do not know", task)

    async def test_in_a_process_of_its_own(self):
        (task,) = source("chain_sum").next(1)
        scorer = ScorerProcess("reasoning_gym", {"name": "chain_sum"}, deadline_s=60)
        (component,) = await scorer.score(task, answered(task.data["answer"], task))
        await scorer.close()
        assert component.value == 1.0


async def test_as_an_environment():
    kind = environment_kind("reasoning_gym:chain_sum")
    assert (kind.scorer.kind, kind.scorer.args) == ("reasoning_gym", {"name": "chain_sum"})
    config = EnvironmentConfig(
        name="reasoning_gym:chain_sum", alias="sums", args={"system": "Answer with a number.", "max_terms": 2}
    )
    worlds = Worlds([config], "train", 0)
    setting = worlds.setting(0)
    assert setting.task.environment == "sums"
    world = worlds.session(setting)
    observation = await world.reset(setting.task, setting.seed)
    assert [message.content for message in observation.messages] == [
        "Answer with a number.",
        setting.task.data["prompt"],
    ]
    result = await world.step(Message(Role.ASSISTANT, "5"), "k")
    assert (result.terminated, result.rewards) == (True, ())
    await world.close()


def test_settings_are_refused_where_other_tasks_are_played():
    name = "reasoning_gym:chain_sum"

    def worlds(**args):
        Worlds([EnvironmentConfig(name=name, alias="sums", args=args, tasks=TasksConfig(source=name))], "train", 0)

    with pytest.raises(
        ConfigError, match=r"environments\.sums\.args: max_terms, zzz would not be used, .* tasks\.args"
    ):
        worlds(max_terms=2, system="Answer.", zzz=1)
    worlds(system="Answer.")


# Every fifth, and those that are peculiar: answers that compare tuples, metadata with counting keys, with fractions.
def _generators():
    import reasoning_gym.factory

    slow = {"composite", "arc_agi", "group_anagrams", "polynomial_equations", "intermediate_integration", "figlet_font"}
    return sorted({*sorted(set(reasoning_gym.factory.DATASETS) - slow)[::5], "rearc", "graph_color", "pool_matrix"})


class TestManyGenerators:
    def test_makes_a_task_whose_answer_is_right(self):
        wrong = []
        for name in _generators():
            scorer = ReasoningGymScorer(name)
            (task,) = source(name).next(1)
            assert survives_json(task.data), name
            if task.data["answer"] is None:
                continue
            (component,) = scorer.score(task, answered(task.data["answer"], task))
            if component.value < 0.99:
                wrong.append((name, component.value))
        assert not wrong

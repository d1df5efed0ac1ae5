"""The generators of the package `reasoning_gym`: as a source of tasks, as an environment, and as a scorer.

The package is an extra and slow to import, so nothing is imported before it is used. A task is made from a seed alone;
its data holds `prompt`, `answer`, `metadata`, and `config` where the recipe changed the generator's settings: all that
its scorer needs.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from headrace.actors.environments.kind import EnvironmentKind
from headrace.actors.tasks.generated import Maker
from headrace.actors.tasks.values import plain
from headrace.platform.config.environments import ScorerConfig
from headrace.platform.config.tasks import TasksConfig
from headrace.platform.contracts import Environment, TaskSource
from headrace.platform.errors import ConfigError
from headrace.platform.records.episode import Episode
from headrace.platform.records.message import RewardComponent, Task
from headrace.platform.records.status import RewardKind

_SEED_BITS = 32  # some generators seed numpy
_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
_EVIDENCE_CHARS = 200


def gym_maker(name: str, args: Mapping[str, Any]) -> Maker:
    """Tasks of the generator `name`, with `args` for its configuration.

    Raises:
        ConfigError: the package is missing, or there is no such generator or setting; names the nearest.
    """
    _check(name, args)

    def generate(seed: int) -> dict[str, Any]:
        entry = _dataset(name, args, seed)[0]
        row = {"prompt": entry["question"], "answer": entry["answer"], "metadata": _as_json(entry["metadata"])}
        return row | ({"config": dict(args)} if args else {})

    return Maker(generate=generate, content=lambda row: {"prompt": row["prompt"]}, seed_bits=_SEED_BITS)


def reasoning_gym_kind(name: str) -> EnvironmentKind:
    """The generator `name` as an environment: one question, one answer, graded by the generator.

    Its args are the generator's settings, and `system` for a system message; where the recipe names other tasks, only
    that. Raises ConfigError.
    """
    _check(name, {})

    def build(args: dict[str, Any]) -> Environment:
        from headrace.actors.environments.doors.single_turn import SingleTurnEnvironment

        return SingleTurnEnvironment(f"reasoning_gym:{name}", system=args.get("system", ""))

    def tasks(split: str, seed: int, args: dict[str, Any]) -> TaskSource:
        from headrace.actors.tasks.opening import open_tasks

        settings = {key: value for key, value in args.items() if key != "system"}
        return open_tasks(TasksConfig(source=f"reasoning_gym:{name}", args=settings), split, seed, name)

    return EnvironmentKind(
        environment=build,
        tasks=tasks,
        scorer=ScorerConfig(kind="reasoning_gym", args={"name": name}),
        environment_args=("system",),
    )


class ReasoningGymScorer:
    """Grades the last assistant message with the generator's own `score_answer`, usually from 0 to 1.

    What stands between `<answer>` tags is the answer, else the whole text. A text that `score_answer` cannot read
    scores 0 as long as it can read the right answer.

    Args:
        name: the generator.
    """

    def __init__(self, name: str) -> None:
        _check(name, {})
        self._name = name
        self._datasets: dict[str, Any] = {}
        self.version = f"reasoning_gym/1 {name} {_package().__version__}"

    def score(self, task: Task, episode: Episode) -> Sequence[RewardComponent]:
        """One outcome component."""
        from headrace.actors.scoring.answers import final_answer

        text = final_answer(episode)
        answer = _package().utils.extract_answer(text) or text
        metadata = _as_tuples(task.data["metadata"]) if self._name in _COMPARES_TUPLES else task.data["metadata"]
        entry = {"question": task.data["prompt"], "answer": task.data["answer"], "metadata": metadata}
        dataset = self._dataset(task.data.get("config", {}))
        evidence = f"answered {answer[:_EVIDENCE_CHARS]!r}"
        try:
            value = float(dataset.score_answer(answer, entry))
        except Exception as error:  # foreign code: some generators raise for a text that is not in their form
            if entry["answer"] is None:
                raise
            dataset.score_answer(entry["answer"], entry)
            value, evidence = 0.0, f"{evidence}, which cannot be read: {type(error).__name__}: {error}"
        return (RewardComponent(RewardKind.OUTCOME, value, evidence=evidence),)

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Sequence[RewardComponent]]:
        """Each episode by itself."""
        return [self.score(task, episode) for episode in episodes]

    def _dataset(self, config: Mapping[str, Any]) -> Any:
        key = json.dumps(config, sort_keys=True)
        if key not in self._datasets:
            self._datasets[key] = _dataset(self._name, config, 0)
        return self._datasets[key]


def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise ConfigError(
            "reasoning_gym:NAME needs the package `reasoning-gym`, which is not installed:"
            " pip install 'headrace[reasoning-gym]'"
        ) from error
    return reasoning_gym


def _dataset(name: str, args: Mapping[str, Any], seed: int) -> Any:
    """The generator with one entry, which depends on the seed alone."""
    return _package().create_dataset(name, **args, seed=seed, size=1)


def _check(name: str, args: Mapping[str, Any]) -> None:
    _package()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3)
        raise ConfigError(
            f"reasoning_gym has no generator {name!r}"
            + (f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(DATASETS)}")
        )
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in args:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"reasoning_gym:{name} has no setting {key!r}; {hint}")
    try:
        _dataset(name, args, 0)
    except Exception as error:  # foreign code: the generator's own checks of its settings
        raise ConfigError(f"reasoning_gym:{name} refuses its settings: {type(error).__name__}: {error}") from error


def _as_json(value: Any) -> Any:
    """`value` as JSON can hold it: keys that count and fractions, which a few generators have, become text."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    try:
        return plain(value)
    except ValueError:
        return str(value)


def _as_tuples(value: Any) -> Any:
    """`value` with every list as a tuple: JSON knows no tuples, and a few generators compare with one."""
    if isinstance(value, list):
        return tuple(_as_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _as_tuples(item) for key, item in value.items()}
    return value

"""Two evaluations of the same tasks and seeds, episode against episode.

Owns what a pair is: outcomes that agree in environment, task, seed and sample. Pairing takes out what makes tasks easy
or hard, so a difference shows with far fewer episodes than two separate intervals need. What cannot be paired is
counted with its reason and enters nothing else.
"""

from collections import Counter, defaultdict

import msgspec

from headrace.platform.errors import ConfigError
from headrace.platform.evaluation.interval import Interval, bootstrap, sign_flip_p
from headrace.platform.evaluation.summary import is_success
from headrace.platform.records.evaluation import EpisodeOutcome, Evaluation

_SIGNIFICANT = 0.05
_EQUAL = 1e-9
_DIGESTS = {
    "recipe": "environments, sampling or budgets are not the same",
    "environments": "the code of an environment has changed",
    "code": "headrace itself has changed",
    "renderer": "prompts become other tokens",
}

_Key = tuple[str, str, int, int]
_Pair = tuple[EpisodeOutcome, EpisodeOutcome]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How b did against a over `pairs` pairs of `tasks` tasks; scores are means, differences are b - a.

    A win is a pair in which b scored more. `p_value` is two-sided, from flipping the signs of whole tasks.
    """

    pairs: int
    tasks: int
    score_a: float
    score_b: float
    score: Interval
    success_a: float
    success_b: float
    success: Interval
    wins: int
    losses: int
    ties: int
    p_value: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `unpaired` counts episodes by reason; `warnings` say what else may explain a difference."""

    a: str
    b: str
    overall: Difference
    environments: dict[str, Difference]
    unpaired: dict[str, int]
    warnings: tuple[str, ...]
    verdict: str


def compare(a: Evaluation, b: Evaluation, seed: int = 0) -> Comparison:
    """How `b` did against `a`; `seed` decides the resampling and nothing else.

    Raises:
        ConfigError: nothing pairs; says why.
    """
    pairs, unpaired = _paired(a, b)
    if not pairs:
        raise ConfigError(f"{label(a)} and {label(b)} cannot be compared: {_cause(a, b)}")
    by_environment: dict[str, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        by_environment[pair[0].environment].append(pair)
    overall = _difference(pairs, seed)
    return Comparison(
        a=label(a),
        b=label(b),
        overall=overall,
        environments={name: _difference(some, seed) for name, some in sorted(by_environment.items())},
        unpaired=unpaired,
        warnings=_warnings(a, b),
        verdict=_verdict(label(a), label(b), overall),
    )


def label(evaluation: Evaluation) -> str:
    """How people name a stored evaluation: RUN@NAME."""
    return f"{evaluation.run}@{evaluation.name}"


def _paired(a: Evaluation, b: Evaluation) -> tuple[list[_Pair], dict[str, int]]:
    """Pairs in which both have a score, and how many episodes are in none, by reason.

    A task that was played twice under one seed gives two pairs, in order.
    """
    ours, theirs = _by_key(a), _by_key(b)
    pairs: list[_Pair] = []
    unpaired: Counter[str] = Counter()
    for key in sorted({*ours, *theirs}):
        mine, other = ours.get(key, []), theirs.get(key, [])
        common = min(len(mine), len(other))
        unpaired["only in a"] += len(mine) - common
        unpaired["only in b"] += len(other) - common
        for one, two in zip(mine, other, strict=False):
            if one.score is not None and two.score is not None:
                pairs.append((one, two))
            else:
                unpaired[_unscored(one, two)] += 1
    return pairs, {reason: count for reason, count in sorted(unpaired.items()) if count}


def _by_key(evaluation: Evaluation) -> dict[_Key, list[EpisodeOutcome]]:
    found: dict[_Key, list[EpisodeOutcome]] = defaultdict(list)
    for each in evaluation.outcomes:
        found[each.environment, each.task_id, each.seed, each.sample].append(each)
    return found


def _unscored(one: EpisodeOutcome, two: EpisodeOutcome) -> str:
    if one.score is None and two.score is None:
        return "no score in either"
    return "no score in a" if one.score is None else "no score in b"


def _difference(pairs: list[_Pair], seed: int) -> Difference:
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    successes: dict[tuple[str, str], list[float]] = defaultdict(list)
    total_a = total_b = 0.0
    good_a = good_b = 0
    for one, two in pairs:
        score_a, score_b = one.score or 0.0, two.score or 0.0
        task = (one.environment, one.task_id)
        scores[task].append(score_b - score_a)
        successes[task].append(float(is_success(score_b)) - float(is_success(score_a)))
        total_a, total_b = total_a + score_a, total_b + score_b
        good_a, good_b = good_a + is_success(score_a), good_b + is_success(score_b)
    changes = [change for task in scores.values() for change in task]
    wins, losses = sum(change > _EQUAL for change in changes), sum(change < -_EQUAL for change in changes)
    count = len(pairs)
    return Difference(
        pairs=count,
        tasks=len(scores),
        score_a=total_a / count,
        score_b=total_b / count,
        score=bootstrap(list(scores.values()), seed),
        success_a=good_a / count,
        success_b=good_b / count,
        success=bootstrap(list(successes.values()), seed),
        wins=wins,
        losses=losses,
        ties=count - wins - losses,
        p_value=sign_flip_p(list(scores.values()), seed),
    )


def _cause(a: Evaluation, b: Evaluation) -> str:
    """Why nothing pairs: the first level at which the two have nothing in common."""
    if not a.outcomes or not b.outcomes:
        return "one of them has no episodes"
    if a.split != b.split:
        return f"one played the split {a.split}, the other {b.split}; evaluate both on one split"
    levels = (
        ("other environments", "use the same recipe", lambda each: each.environment),
        ("other tasks", "use the same recipe", lambda each: (each.environment, each.task_id)),
        ("the same tasks under other seeds", "give both the same --seed", lambda e: (e.environment, e.task_id, e.seed)),
        ("other samples", "give both the same --samples", lambda e: (e.environment, e.task_id, e.seed, e.sample)),
    )
    for what, remedy, key in levels:
        if not {key(each) for each in a.outcomes} & {key(each) for each in b.outcomes}:
            return f"they played {what}; {remedy}"
    return "no pair has a valid score on both sides"


def _warnings(a: Evaluation, b: Evaluation) -> tuple[str, ...]:
    return tuple(
        f"{name} differs: {meaning}" for name, meaning in _DIGESTS.items() if a.digests.get(name) != b.digests.get(name)
    )


def _verdict(a: str, b: str, overall: Difference) -> str:
    evidence = f"{overall.pairs} pairs of {overall.tasks} tasks, p = {overall.p_value:.2g}"
    if overall.p_value > _SIGNIFICANT:
        return f"no difference shown between {a} and {b}: score {_signed(overall.score)} ({evidence})"
    better, worse = (b, a) if overall.score.mean > 0 else (a, b)
    return f"{better} is better than {worse}: score {_signed(overall.score)} from a to b ({evidence})"


def _signed(interval: Interval) -> str:
    return f"+{interval}" if interval.mean >= 0 else str(interval)

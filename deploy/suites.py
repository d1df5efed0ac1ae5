"""Fixed replay suites: one file of recorded episodes that tells "the model got worse" from "the world changed".

`freeze` picks episodes of a run and writes them down with everything that another day needs but code and weights;
`check_world` does their actions again, and has them graded again; `play_model` plays the same tasks under the same
seeds with a policy of today and compares success pair by pair.

Two kinds of episodes are in a suite. Some cover each kind of ending, so that all of the world's behaviour is tried. The
others are drawn without regard to how they went, and the policy is compared on these alone: choosing them by their
ending would make any policy look better or worse than it is.
"""

import asyncio
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace import __version__
from headrace.actors.episode import play_episode
from headrace.actors.outcomes import outcome_of
from headrace.actors.plan import EpisodePlan, PlayedEpisode
from headrace.actors.sampling import sampling_params
from headrace.actors.worlds import Worlds
from headrace.deploy.replaying import Tally, replay_all, run_config
from headrace.deploy.stored_policy import StoredPolicy, stored_policy
from headrace.deploy.wiring import build_scorers
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.errors import ConfigError, NotFound, RunFailed, SchemaError
from headrace.platform.evaluation.comparison import Comparison, compare
from headrace.platform.evaluation.record import evaluation_of
from headrace.platform.evaluation.summary import is_success
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.records.evaluation import EpisodeOutcome, Evaluation
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import FaultOwner, Purpose
from headrace.platform.records.tables import RewardRow, score_of
from headrace.platform.seeding import derive_seed
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.files import is_local, open_url, write_atomic
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable

SCHEMA_VERSION = 1
SIGNIFICANT = 0.05
"""The p-value up to which a difference of the model is one."""


class FrozenEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An episode as it was stored, and its rewards. `compared`: a policy is measured against its score."""

    payload: bytes
    rewards: tuple[RewardRow, ...] = ()
    score: float | None = None
    compared: bool = False


class SuiteHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the suite holds. `version` played what is compared, None where several did; `success` is its share of
    successes, over the scored ones. `samples` is how many episodes the run's evaluations played per task."""

    schema_version: int = msgspec.field(default_factory=lambda: SCHEMA_VERSION)
    headrace: str
    run: str
    created_at_s: float
    seed: int
    run_seed: int
    samples: int
    version: int | None
    success: float | None
    endings: dict[str, int]
    environments: list[dict[str, Any]]


class Suite(msgspec.Struct, frozen=True, kw_only=True):
    """The file: a msgpack map whose first entry is the header."""

    header: SuiteHeader
    episodes: tuple[FrozenEpisode, ...]

    @property
    def configs(self) -> tuple[EnvironmentConfig, ...]:
        """The environments of the recipe."""
        return tuple(EnvironmentConfig.model_validate(each) for each in self.header.environments)


class _Opening(msgspec.Struct):
    header: msgspec.Raw


class _Schema(msgspec.Struct):
    schema_version: int


# --- freezing ---------------------------------------------------------------------------------------------------------


async def freeze(root: RunRoot, out: str, episodes: int, seed: int) -> Suite:
    """Write a suite of about `episodes` episodes of a run to `out`, which `seed` picks.

    Raises:
        NotFound: the run has no stored episode.
        RunFailed: one of them does not replay equal now, or is graded otherwise; nothing is written.
    """
    config = run_config(root)
    compared, covering = await asyncio.to_thread(_picked, root, episodes, seed)
    chosen = [each for each in EpisodeStore(root.url).iterate() if each.episode_id in {*compared, *covering}]
    rows = RewardTable(root.url).by_episode()
    rewards = {each.episode_id: rows.get(each.episode_id, []) for each in chosen}
    tally = await _checked(chosen, config.environments, config.seed, rewards)
    if not tally.equal:
        raise RunFailed(f"nothing is frozen: {_first_change(tally)}; only what replays equal now can tell of a change")
    scores = {each.episode_id: _score(each, rewards[each.episode_id]) for each in chosen}
    measured = [score for key in compared if (score := scores[key]) is not None]
    versions = {each.version.number for each in chosen if each.episode_id in compared}
    suite = Suite(
        header=SuiteHeader(
            headrace=__version__,
            run=root.name,
            created_at_s=time.time(),
            seed=seed,
            run_seed=config.seed,
            samples=config.eval.samples,
            version=versions.pop() if len(versions) == 1 else None,
            success=sum(map(is_success, measured)) / len(measured) if measured else None,
            endings=dict(Counter(" ".join(_kind(each)) for each in chosen)),
            environments=[each.model_dump(mode="json") for each in config.environments],
        ),
        episodes=tuple(
            FrozenEpisode(
                payload=episode_codec.encode(each),
                rewards=tuple(rewards[each.episode_id]),
                score=scores[each.episode_id],
                compared=each.episode_id in compared,
            )
            for each in chosen
        ),
    )
    fs, path = open_url(out)
    await asyncio.to_thread(write_atomic, fs, path, msgspec.msgpack.encode(suite))
    return suite


def nothing_to_compare(suite: Suite) -> str:
    """Why no policy can be compared on the suite; empty where one can."""
    compared = [each for each in suite.episodes if each.compared]
    if not compared:
        return "no episode of it may be compared: the run has no evaluation, and all it played met injected faults"
    if all(each.score is None for each in compared):
        return f"none of the {len(compared)} episodes that it compares a policy on has a score; freeze more"
    return ""


def read_suite(file: str) -> Suite:
    """Raises NotFound for no such file, SchemaError for one that is no suite that this build reads."""
    fs, path = open_url(file)
    try:
        data = fs.cat_file(path)
    except FileNotFoundError:
        raise NotFound(f"there is no file {file}") from None
    try:
        schema = msgspec.msgpack.decode(msgspec.msgpack.decode(data, type=_Opening).header, type=_Schema)
        if schema.schema_version != SCHEMA_VERSION:
            raise SchemaError(f"{file}: schema {schema.schema_version}; this build reads {SCHEMA_VERSION}")
        return msgspec.msgpack.decode(data, type=Suite)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SchemaError(f"{file} is not a replay suite: {error}") from error


def _picked(root: RunRoot, count: int, seed: int) -> tuple[set[str], set[str]]:
    """Ids of what a policy is compared on, and of one episode of each kind of ending, at most half of `count` where
    there is something to compare.

    Compared is the newest version that was evaluated, else whatever was played without injected faults. What branched
    off is left out.
    """
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    evaluated: dict[int, list[str]] = defaultdict(list)
    others: list[str] = []
    for episode in EpisodeStore(root.url).iterate():
        if episode.purpose is Purpose.REPLAY:
            continue
        kinds[_kind(episode)].append(episode.episode_id)
        if episode.purpose is Purpose.EVAL:
            evaluated[episode.version.number].append(episode.episode_id)
        elif not episode.injected_faults:
            others.append(episode.episode_id)
    if not kinds:
        raise NotFound(f"{root.name} has no stored episode")
    dice = random.Random(derive_seed("suite", seed))
    covering = [dice.choice(sorted(set(ids))) for _, ids in sorted(kinds.items())]
    dice.shuffle(covering)
    pool = sorted(set(evaluated[max(evaluated)] if evaluated else others))
    covering = covering[: count // 2 if pool else count]
    compared = dice.sample(pool, min(len(pool), count - len(covering)))
    return set(compared), set(covering)


def _kind(episode: Episode) -> tuple[str, ...]:
    """What makes an ending another one."""
    faults = sorted({fault.kind for fault in episode.injected_faults})
    return (episode.task.environment, str(episode.status), str(episode.stop_reason), *faults)


def _score(episode: Episode, rewards: Sequence[RewardRow]) -> float | None:
    return None if episode.fault_owner is not FaultOwner.NONE else score_of(rewards)


# --- running ----------------------------------------------------------------------------------------------------------


async def check_world(suite: Suite) -> Tally:
    """Do every recorded action again in the worlds at hand, and have the graders of today grade each episode. Raises
    ConfigError where one cannot be made."""
    episodes = [episode_codec.decode(each.payload) for each in suite.episodes]
    rewards = {each.episode_id: list(frozen.rewards) for each, frozen in zip(episodes, suite.episodes, strict=True)}
    return await _checked(episodes, suite.configs, suite.header.run_seed, rewards)


async def _checked(
    episodes: Iterable[Episode],
    configs: Sequence[EnvironmentConfig],
    seed: int,
    rewards: Mapping[str, Sequence[RewardRow]],
) -> Tally:
    graders = await asyncio.to_thread(build_scorers, configs)
    try:
        return await replay_all(episodes, configs, seed, rewards=rewards, graders=graders)
    finally:
        await asyncio.gather(*(grader.close() for grader in graders.values()))


async def play_model(suite: Suite, root: RunRoot, version: str) -> Comparison:
    """Play the compared tasks and seeds with a version of a run; a is the suite, b what was played now.

    The dice of an episode are those of the recorded one, so that equal weights sample the same again. Nothing is
    stored.

    Raises:
        ConfigError: nothing can be compared.
        NotFound: there is no such version.
    """
    config = run_config(root).model_copy(update={"environments": suite.configs})
    worlds = await asyncio.to_thread(Worlds, config.environments, "train", suite.header.run_seed)
    frozen = [(episode_codec.decode(each.payload), each) for each in suite.episodes if each.compared]
    free = asyncio.Semaphore(config.rollout.max_episodes)
    try:
        await asyncio.to_thread(worlds.open_resources)
        async with stored_policy(root, version, config) as policy:

            async def again(episode: Episode) -> PlayedEpisode:
                async with free:
                    return await _again(suite, episode, worlds, policy, config.serving.request_deadline_s)

            played = await asyncio.gather(*(again(episode) for episode, _ in frozen))
            number = policy.version.number
    finally:
        await worlds.resources.close()
    before = [PlayedEpisode(episode=episode, rewards=each.rewards, score=each.score) for episode, each in frozen]
    a = _evaluation(suite, before, "suite", suite.header.run, suite.header.version)
    return compare(a, _evaluation(suite, played, f"v{number}", root.name, number))


async def _again(
    suite: Suite, episode: Episode, worlds: Worlds, policy: StoredPolicy, request_deadline_s: float
) -> PlayedEpisode:
    before = episode.attempt_id
    (config,) = (each for each in suite.configs if each.known_as == episode.task.environment)
    plan = EpisodePlan(
        attempt_id=AttemptId("suite", before.group, before.sample, before.attempt, before.purpose),
        task=episode.task,
        seed=episode.seed,
        sample=before.sample % suite.header.samples if before.purpose is Purpose.EVAL else None,
        version=policy.version,
        sampling=sampling_params(config, policy.renderer),
        budgets=episode.budgets,
        digests=policy.digests,
        reset_deadline_s=config.reset_deadline_s,
        step_deadline_s=config.step_deadline_s,
        request_deadline_s=request_deadline_s,
        dispatched_s=time.time(),
        worker_id="suite",
    )
    session = worlds.async_environment(config)
    return await play_episode(plan, session, policy.renderer, policy.generator, policy.scorers.get(config.known_as))


def _evaluation(suite: Suite, played: Iterable[PlayedEpisode], name: str, run: str, version: int | None) -> Evaluation:
    """What was played as an evaluation, the episodes of one task and seed told apart by their order."""
    seen: Counter[tuple[str, str, int]] = Counter()
    outcomes: list[EpisodeOutcome] = []
    for each in played:
        key = (each.episode.task.environment, each.episode.task.task_id, each.episode.seed)
        outcomes.append(outcome_of(each, seen[key]))
        seen[key] += 1
    return evaluation_of(
        outcomes,
        name=name,
        run=run,
        model=run,
        version=version,
        split="suite",
        tasks=len(outcomes),
        samples=1,
        created_at_s=suite.header.created_at_s,
        digests={},
    )


# --- the verdict ------------------------------------------------------------------------------------------------------


def verdict(suite: Suite, tally: Tally, comparison: Comparison | None) -> dict[str, Any]:
    """What a run of a suite found, for `--json`; its `verdict` is the one line for people. A world that could not be
    tried, by no fault of its own, is neither the same nor changed."""
    world, told = "same", "the world is the same"
    if changed := tally.diverged + tally.refusals:
        world = "changed"
        told = f"the world changed: {changed} of {tally.episodes} episodes, such as {_first_change(tally)}"
    elif not tally.equal:
        world = "not tried"
        untried = len(suite.episodes) - tally.episodes + tally.interruptions
        told = f"the world could not be tried: {untried} of {len(suite.episodes)} episodes; {_first_change(tally)}"
    facts: dict[str, Any] = {
        "world": world,
        "model": "not played",
        "verdict": f"{told} ({tally.episodes - tally.not_compared} episodes replayed); the model was not played",
        "suite_of": suite.header.run,
        "episodes": tally.episodes,
        "changed": {each.episode_id: each.first_divergence for each in tally.reports},
        "refused": tally.refused,
        "interrupted": tally.interrupted,
        "stopped": tally.stopped,
        "fidelity_gap": tally.fidelity_gap,
    }
    if comparison is None:
        return facts
    overall = comparison.overall
    model = "same"
    if overall.p_value <= SIGNIFICANT:
        model = "better" if overall.score.mean > 0 else "worse"
    shown = "no worse and no better, as far as they show" if model == "same" else model
    evidence = f"{overall.pairs} pairs, success {overall.success_a:.3f} before, {overall.success_b:.3f} now"
    return facts | {
        "model": model,
        "verdict": f"{told}; the model is {shown} ({evidence}, p = {overall.p_value:.2g})",
        "pairs": overall.pairs,
        "success_frozen": overall.success_a,
        "success_now": overall.success_b,
        "score_difference": overall.score.mean,
        "p_value": overall.p_value,
        "unpaired": comparison.unpaired,
    }


def _first_change(tally: Tally) -> str:
    if tally.reports:
        report = tally.reports[0]
        what = next(each.what for each in report.differences if each.is_divergence)
        return f"{report.episode_id}, which differs first at step {report.first_divergence} ({what})"
    if tally.refused:
        return next(iter(tally.refused.values()))
    if tally.stopped:
        return tally.stopped
    episode_id, why = next(iter(tally.interrupted.items()))
    return f"{episode_id} was not played to its end: {why}"


def check_out(out: str) -> None:
    """Raises ConfigError where no file can be written, or one is there already that is no suite, so that nothing else
    is overwritten."""
    fs, path = open_url(out)
    if not is_local(fs):
        return
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file, such as {file / 'suite.msgpack'}")
    folder = next(each for each in file.parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        if file.exists():
            read_suite(out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error
    except SchemaError as error:
        raise ConfigError(f"--out {out}: the file is there already and is no replay suite") from error

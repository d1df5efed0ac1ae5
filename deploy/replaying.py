"""Replaying stored episodes of a run: one, some, or all of them, streamed, several at once.

Owns which episodes are played and what is kept of their reports: of a whole run only counts and the first reports that
say something, so that memory does not grow with the run. What a replay is, is `actors/replay.py`.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.actors.replay import Limits, ReplayReport, replay_episode
from headrace.actors.worlds import Worlds
from headrace.platform.config import RunConfig
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.config.load import config_from_text
from headrace.platform.errors import NotFound
from headrace.platform.records.episode import Episode
from headrace.platform.records.tables import RewardRow
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot

AT_ONCE = 16
"""How many episodes are replayed at once."""

_SHOWN = 50  # reports that are kept of a whole run


@dataclass(kw_only=True, slots=True)
class Tally:
    """What replays found.

    `reports` are the first that diverge (with `keep_all` the first), `refused` the first that could not be compared,
    with the reason; the counts are over all. `fidelity_gap` adds up the answers that came from cassettes.
    """

    episodes: int = 0
    steps: int = 0
    diverged: int = 0
    refusals: int = 0
    from_record: int = 0
    accidental: int = 0
    fidelity_gap: int = 0
    live_calls: int = 0
    seconds: float = 0.0
    keep_all: bool = False
    reports: list[ReplayReport] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Every episode was compared and replays equal."""
        return not (self.diverged or self.refusals)

    def add(self, report: ReplayReport) -> None:
        """Count a report."""
        self.episodes += 1
        self.steps += report.steps
        self.from_record += bool(report.from_record)
        self.fidelity_gap += report.fidelity_gap
        self.live_calls += report.live_calls
        self.diverged += not report.equal
        self.accidental += report.equal and bool(report.differences)
        if (self.keep_all or not report.equal) and len(self.reports) < _SHOWN:
            self.reports.append(report)

    def refuse(self, episode_id: str, reason: str) -> None:
        """Count an episode that could not be compared."""
        self.episodes += 1
        self.refusals += 1
        if len(self.refused) < _SHOWN:
            self.refused[episode_id] = reason


def run_config(root: RunRoot) -> RunConfig:
    """The recipe that a run was started with."""
    return config_from_text(root.read_config(), [], f"{root.name}/config.yaml")


def chosen_episodes(root: RunRoot, names: Sequence[str], limit: int | None = None) -> Iterator[Episode]:
    """The episodes of these ids or unique prefixes, in that order; all stored ones for none. At most `limit`.

    Raises:
        NotFound: an id fits none, or several; or nothing is stored.
    """
    store = EpisodeStore(root.url)
    found = map(store.find, names) if names else store.iterate()
    count = 0
    for episode in found:
        if limit is not None and count >= limit:
            return
        count += 1
        yield episode
    if not count and limit != 0:
        raise NotFound(f"{root.name} has no stored episode")


async def replay_all(
    episodes: Iterable[Episode],
    configs: Sequence[EnvironmentConfig],
    seed: int,
    *,
    live: bool = False,
    rewards: dict[str, list[RewardRow]] | None = None,
    keep_all: bool = False,
    at_once: int = AT_ONCE,
) -> Tally:
    """Replay `episodes` in the worlds of `configs`, under keys of a branch that no replay before had (P26).

    Args:
        episodes: taken one by one, as there is room for them.
        seed: of the run.
        live: see `replay_episode`.
        rewards: by episode; where given, what the worlds gave is compared too.
        keep_all: keep the reports of equal episodes too.

    Raises:
        ConfigError: a world cannot be made here.
    """
    worlds = await asyncio.to_thread(Worlds, configs, "train", seed)
    tally, began = Tally(keep_all=keep_all), time.monotonic()
    branch, waiting = 1 + secrets.randbits(31), iter(episodes)
    limits = {each.known_as: limits_of(each) for each in configs}

    async def replays() -> None:
        for episode in waiting:
            try:
                report = await replay_episode(
                    episode,
                    worlds.session_of(episode),
                    branch=branch,
                    limits=limits[episode.task.environment],
                    live=live,
                    rewards=None if rewards is None else rewards.get(episode.episode_id, []),
                )
            except NotFound as error:
                tally.refuse(episode.episode_id, str(error))
            else:
                tally.add(report)

    try:
        await asyncio.to_thread(worlds.open_resources)
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(replays())
    except ExceptionGroup as group_of_errors:
        raise group_of_errors.exceptions[0] from None
    finally:
        await worlds.resources.close()
    tally.seconds = time.monotonic() - began
    return tally


def limits_of(config: EnvironmentConfig) -> Limits:
    """How long the environment of a recipe may take."""
    return Limits(reset_deadline_s=config.reset_deadline_s, step_deadline_s=config.step_deadline_s)


def report_facts(report: ReplayReport) -> dict[str, Any]:
    """A report for `--json`."""
    return {
        "episode_id": report.episode_id,
        "steps": report.steps,
        "equal": report.equal,
        "first_divergence": report.first_divergence,
        "from_record": report.from_record,
        "fidelity_gap": report.fidelity_gap,
        "fidelity_steps": list(report.fidelity_steps),
        "live_calls": report.live_calls,
        "differences": [
            {
                "step": each.step,
                "what": each.what,
                "divergence": each.is_divergence,
                "recorded": each.recorded.canonical,
                "replayed": each.replayed.canonical,
                "diff": list(each.diff),
            }
            for each in report.differences
        ],
    }


def tally_facts(run: str, tally: Tally) -> dict[str, Any]:
    """What many replays found, for `--json`."""
    return {
        "run": run,
        "episodes": tally.episodes,
        "equal": tally.equal,
        "diverged": tally.diverged,
        "refused": tally.refusals,
        "from_record": tally.from_record,
        "only_raw_differs": tally.accidental,
        "steps": tally.steps,
        "fidelity_gap": tally.fidelity_gap,
        "live_calls": tally.live_calls,
        "seconds": round(tally.seconds, 3),
        "reports": [report_facts(report) for report in tally.reports],
        "reasons": tally.refused,
    }

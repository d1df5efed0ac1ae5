"""Replaying stored episodes of a run: one, some, or all of them, streamed, several at once.

Owns which episodes are played and what is kept of their reports: of a whole run only counts and the first reports that
say something, so that memory does not grow with the run. What a replay is, is `actors/replay.py`. What a fresh world
may not meet (a host or a sandbox is gone) is tried once more, and then it is no claim about the world. Where no host
takes sessions at all, the rest is not waited for.
"""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.plan import AsyncScorer
from headrace.actors.replay import Limits, ReplayReport, replay_episode
from headrace.actors.worlds import Worlds
from headrace.deploy.regrading import graded_again
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
_NOWHERE = 3  # so many episodes in a row that no host took: there are no hosts
_NEWS_S = 5.0


@dataclass(kw_only=True, slots=True)
class Tally:
    """What replays found.

    `reports` are the first that diverge (with `keep_all` the first), `refused` the first that could not be compared,
    with the reason, `interrupted` the first that could not be played to their end, with what kept them from it; the
    counts are over all. `fidelity_gap` adds up the answers that came from cassettes. `stopped` is empty, or why further
    episodes were not tried.
    """

    episodes: int = 0
    steps: int = 0
    diverged: int = 0
    refusals: int = 0
    interruptions: int = 0
    from_record: int = 0
    accidental: int = 0
    fidelity_gap: int = 0
    live_calls: int = 0
    seconds: float = 0.0
    keep_all: bool = False
    reports: list[ReplayReport] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    interrupted: dict[str, str] = field(default_factory=dict)
    stopped: str = ""

    @property
    def equal(self) -> bool:
        """Every episode was compared and replays equal."""
        return not (self.diverged or self.refusals or self.interruptions or self.stopped)

    @property
    def not_compared(self) -> int:
        """Refused ones, and those that could not be played to their end."""
        return self.refusals + self.interruptions

    def add(self, report: ReplayReport) -> None:
        """Count a report."""
        self.episodes += 1
        self.steps += report.steps
        self.from_record += bool(report.from_record)
        self.fidelity_gap += report.fidelity_gap
        self.live_calls += report.live_calls
        if report.interrupted:
            self.interruptions += 1
            if len(self.interrupted) < _SHOWN:
                self.interrupted[report.episode_id] = report.interrupted
            if not self.keep_all:
                return
        self.diverged += report.first_divergence is not None
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
    rewards: Mapping[str, Sequence[RewardRow]] | None = None,
    graders: Mapping[str, AsyncScorer] | None = None,
    keep_all: bool = False,
    at_once: int = AT_ONCE,
    news: Callable[[Tally], None] | None = None,
) -> Tally:
    """Replay `episodes` in the worlds of `configs`, under keys of a branch that no replay before had (P26).

    Args:
        episodes: taken one by one, as there is room for them.
        seed: of the run.
        live: see `replay_episode`.
        rewards: by episode; what the worlds gave is compared for those that are in it.
        graders: by environment; where given, every episode is graded again too. The caller closes them.
        keep_all: keep the reports of equal episodes too.
        news: told every few seconds what was found so far.

    Raises:
        ConfigError: a world cannot be made here.
    """
    replays = _Replays(
        episodes=iter(episodes),
        worlds=await asyncio.to_thread(Worlds, configs, "train", seed),
        limits={each.known_as: limits_of(each) for each in configs},
        live=live,
        rewards=rewards or {},
        graders=graders,
        tally=Tally(keep_all=keep_all),
    )
    tally, resources, began = replays.tally, replays.worlds.resources, time.monotonic()
    telling = asyncio.create_task(_tell(news, tally)) if news is not None else None
    try:
        await asyncio.to_thread(replays.worlds.open_resources)
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(replays.work())
    except ExceptionGroup as group_of_errors:
        if not group_of_errors.subgroup(_NoHosts):
            raise group_of_errors.exceptions[0] from None
    finally:
        if telling is not None:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling
        await resources.close()
    tally.seconds = time.monotonic() - began
    return tally


class _NoHosts(Exception):
    """Ends all replays at once; the tally says why. Never leaves this module."""


@dataclass(kw_only=True, slots=True)
class _Replays:
    """Replays under way, which share one source of episodes."""

    episodes: Iterator[Episode]
    worlds: Worlds
    limits: dict[str, Limits]
    live: bool
    rewards: Mapping[str, Sequence[RewardRow]]
    graders: Mapping[str, AsyncScorer] | None
    tally: Tally
    branch: int = field(default_factory=lambda: 1 + 2 * secrets.randbits(30))
    nowhere: Counter[str] = field(default_factory=Counter)
    playing: list[tuple[str, AsyncEnvironment]] = field(default_factory=list)

    async def work(self) -> None:
        """Replay what nobody else has begun, until nothing is left."""
        for episode in self.episodes:
            try:
                report = await self._report(episode)
            except NotFound as error:
                self.tally.refuse(episode.episode_id, str(error))
            else:
                self.tally.add(report)
                self._look_at_hosts(episode.task.environment, report)

    async def _report(self, episode: Episode) -> ReplayReport:
        name = episode.task.environment
        report = await self._played(episode, self.branch)
        while report.nowhere and self._has_hosts(name):  # they are busy with others of this replay
            report = await self._played(episode, self.branch)
        if report.interrupted and not report.nowhere:
            report = await self._played(episode, self.branch + 1)  # P26: this is another branch
        if self.graders is None or report.nowhere:
            return report
        return await graded_again(report, episode, self.rewards.get(episode.episode_id, ()), self.graders.get(name))

    async def _played(self, episode: Episode, branch: int) -> ReplayReport:
        name = episode.task.environment
        place = (name, await self.worlds.session_of(episode))
        self.playing.append(place)
        try:
            return await replay_episode(
                episode,
                place[1],
                branch=branch,
                limits=self.limits[name],
                live=self.live,
                rewards=self.rewards.get(episode.episode_id),
            )
        finally:
            self.playing.remove(place)

    def _has_hosts(self, name: str) -> bool:
        """A host plays an episode of this environment now."""
        return any(session.provenance.pool for other, session in self.playing if other == name)

    def _look_at_hosts(self, name: str, report: ReplayReport) -> None:
        """An environment whose hosts are gone costs the whole deadline of a reset for each episode."""
        self.nowhere[name] = self.nowhere[name] + 1 if report.nowhere else 0
        if self.nowhere[name] >= _NOWHERE:
            told = f"{_NOWHERE} episodes in a row found no host of {name}: {report.interrupted}"
            self.tally.stopped = f"{told}; start hosts with `headrace env serve`, and try again"
            raise _NoHosts


async def _tell(news: Callable[[Tally], None], tally: Tally) -> None:
    while True:
        await asyncio.sleep(_NEWS_S)
        news(tally)


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
        "interrupted": report.interrupted,
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
        "interrupted": tally.interruptions,
        "from_record": tally.from_record,
        "only_raw_differs": tally.accidental,
        "steps": tally.steps,
        "fidelity_gap": tally.fidelity_gap,
        "live_calls": tally.live_calls,
        "seconds": round(tally.seconds, 3),
        "reports": [report_facts(report) for report in tally.reports],
        "reasons": tally.refused,
        "interruptions": tally.interrupted,
    }

"""What the conductor needs of the place where the parts run. Two implementations: Ray, and this very process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.actors.news import News
from headrace.actors.outcomes import EnvironmentCounts
from headrace.actors.plan import PlayedEpisode
from headrace.actors.quarantine import QuarantinedTask
from headrace.platform.records.delivery import LedgerStats
from headrace.platform.records.evaluation import EpisodeOutcome
from headrace.platform.records.tables import FateRow
from headrace.trainer.report import StepReport

Interval = tuple[float, float]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """What the parts have been doing: sampled tokens and failed loads since the start, what runs now, the oldest of the
    newest versions that the replicas hold (-1 before the first), and when engines or tools were executing. `faults` are
    the last faults of episodes, for the message when a run has to stop; `environments` are counts of training episodes
    since the start, by environment. `warnings` are what the user should know of the run's server, each once;
    `quarantined` are the tasks that workers have put into quarantine. Since the start: `rolled_s`, the seconds in which
    a replica was between two versions and sampled nothing; `retried` and `resampled` generations (P24)."""

    replicas: int
    loaded_version: int
    load_failures: int
    sampled_tokens: int
    requests_running: int
    episodes_running: int
    executing: tuple[Interval, ...]
    faults: tuple[str, ...]
    environments: dict[str, EnvironmentCounts] = {}
    warnings: tuple[str, ...] = ()
    quarantined: tuple[QuarantinedTask, ...] = ()
    rolled_s: float = 0.0
    retried: int = 0
    resampled: int = 0


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run begins, or goes on: the head and the learner steps behind it."""

    head: int
    steps: int


class Runtime(Protocol):
    """Order: `prepare`, `begin`, then the rest, then `close`, which is safe at any time and more than once.

    A part that dies is started again, and calls that concern it are repeated; what it alone knew is lost. One that dies
    again and again without a learner step in between, or that nothing can start again, shows as RunFailed from every
    call that concerns it and from `activity` (case E9).
    """

    async def prepare(self) -> None:
        """Start what needs no model yet: servers, processes, engines."""

    async def begin(self, model_dir: Path) -> Begun:
        """Publish the first version, or take a run up from its newest checkpoint (P6), and make the workers ready."""

    async def start_rollouts(self) -> None:
        """Let the workers play training groups."""

    async def stop_rollouts(self) -> None:
        """End what runs and close the ledger's books: nothing is in flight afterwards."""

    async def step(self) -> StepReport:
        """One learner step. After a learner has died it may be one that was done before: the run goes on from the
        newest checkpoint (P6)."""

    async def evaluate(self, version: int, split: str, tasks: int, samples: int, index: int) -> list[EpisodeOutcome]:
        """Play `tasks` evaluation tasks `samples` times each with `version`, which every replica holds or is held to;
        evaluation number `index` of the run. Training goes on meanwhile.

        Raises:
            PartDied: a part that took part died; it is there again, and the evaluation may be played anew under
                another index.
        """

    async def hold(self, version: int) -> None:
        """Keep `version` loaded, whatever is published after it, until `let_go`."""

    async def let_go(self, version: int) -> None:
        """`version` need not be kept loaded any longer."""

    async def keep(self, versions: Sequence[int]) -> None:
        """Keep the weights of exactly these versions in the registry, besides those that it keeps by itself."""

    async def news(self) -> News:
        """What workers' episodes scored since the last call, for the curriculum."""

    async def tell(self, news: News) -> None:
        """Tell every worker."""

    async def recent(self, n: int) -> list[PlayedEpisode]:
        """Some of the training episodes that were played lately, at most `n`."""

    async def activity(self, since_s: float) -> Activity:
        """What happened since `since_s`, seconds since the epoch."""

    async def ledger(self) -> LedgerStats:
        """The ledger's counts."""

    async def fates(self) -> list[FateRow]:
        """The next fates that were decided, in order, none when there are no more. A page is forgotten when the next
        one is asked for."""

    def restarts(self) -> Mapping[str, int]:
        """How often each part was started again."""

    async def close(self) -> None:
        """End everything that was started here."""

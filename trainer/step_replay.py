"""Learner steps taken again from stored episodes: the same intake, the same backend, no ledger.

Groups are opened as the learner opened them then: by payload hash, judged for lag against the weights of that time
(P14, P15), credited by the algorithm as it stood. A group that does not open any more is refused, never left out: a
step without it would be another step. Changes nothing but the backend and the algorithm that it is given.
"""

from collections.abc import Mapping, Sequence

from headrace.platform.config.episode_queue import QueueConfig
from headrace.platform.config.learner import LearnerConfig
from headrace.platform.contracts import Algorithm, LearnerBackend
from headrace.platform.errors import NotFound, RunFailed
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.records.delivery import LedgerLimits
from headrace.trainer.intake import Intake, OpenedGroup, ReadEpisodes, ReadRewards
from headrace.trainer.observations import ContentSpan
from headrace.trainer.one_step import take_step
from headrace.trainer.step_history import RecordedStep


class StepReplay:
    """See the module.

    Args:
        config: the learner's.
        queue: the lag limit and what happens at it.
        limits: the run's.
        backend: at the weights that the first step to replay started from.
        algorithm: as it stood then.
        read_episodes: reads stored payloads.
        read_rewards: reads reward rows.
        content: see `Intake`.
    """

    def __init__(
        self,
        *,
        config: LearnerConfig,
        queue: QueueConfig,
        limits: LedgerLimits,
        backend: LearnerBackend,
        algorithm: Algorithm,
        read_episodes: ReadEpisodes,
        read_rewards: ReadRewards | None,
        content: ContentSpan | None = None,
    ) -> None:
        self._backend = backend
        self._algorithm = algorithm
        self._intake = Intake(
            config=config,
            queue=queue,
            algorithm=algorithm,
            ledger=MemoryLedger("replay", limits, _no_time),
            read_episodes=read_episodes,
            read_rewards=read_rewards,
            clock=_no_time,
            say=_say_nothing,
            inline=True,
            content=content,
        )

    async def open(self, recorded: RecordedStep) -> Sequence[OpenedGroup]:
        """The batch of a step.

        Raises:
            NotFound: a stored episode is gone, or a group does not open as it did: its record was changed, or this
                build judges it otherwise.
        """
        opened, refused = await self._intake.open(recorded.groups, recorded.start)
        if refused:
            first = refused[0]
            raise NotFound(
                f"learner step {recorded.step} cannot be recomputed: group {first.group} is refused"
                f" ({first.reason}): {first.detail}"
            )
        for group in opened:
            left = len(group.leased.members) - sum(member.live for member in group.members)
            stated = recorded.left_out[group.leased.group]
            if left != stated:
                raise NotFound(
                    f"learner step {recorded.step} cannot be recomputed: {left} members of group"
                    f" {group.leased.group} are over the lag limit now, and {stated} were then"
                )
        return opened

    async def take(self, recorded: RecordedStep) -> Mapping[str, float]:
        """Take a step; its figures.

        Raises:
            NotFound: see `open`.
            RunFailed: the step is not finite, as it cannot have been then.
        """
        opened = await self.open(recorded)
        try:
            return take_step(self._backend, self._algorithm, opened)
        except ArithmeticError as error:
            raise RunFailed(f"the recomputed step is not finite: {error}") from error


def _no_time() -> float:
    """Nothing here depends on the time."""
    return 0.0


def _say_nothing(*_: object, **__: int) -> None:
    """Nobody watches."""

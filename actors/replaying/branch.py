"""Branching: an episode that begins as another one did, up to a step, and then goes its own way.

The world is re-executed under keys of a branch of its own (P26) and compared on the way; the tokens are taken over as
they were recorded, never encoded again, so that the policy goes on from exactly what was seen and said (cases T1, T2).
"""

from dataclasses import dataclass

import msgspec

from headrace.actors.context import Context
from headrace.actors.deadline import Deadline
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.environments.cassette import load_cassette
from headrace.actors.plan import EpisodePlan
from headrace.actors.recorder import Recorder, as_step_message
from headrace.actors.replaying.execution import Execution, Limits, actions_of
from headrace.actors.text import well_formed
from headrace.platform.contracts import Renderer
from headrace.platform.errors import CannotBranch, ConfigError, EnvironmentFault, NotFound
from headrace.platform.records.episode import Episode, InjectedFault
from headrace.platform.records.message import Message, StepResult
from headrace.platform.records.status import Purpose, Role, StopReason
from headrace.platform.records.turn import Turn

BRANCH = 1
"""The branch number in the keys of an episode that branches off: one that plays from its beginning has 0."""

_ENDS = (StopReason.TERMINATED, StopReason.ENV_TRUNCATED)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first turns of `parent`: up to the answer to its `step`-th turn of the policy, 0 for the reset alone."""

    parent: Episode
    step: int

    @property
    def length(self) -> int:
        """How many turns it has."""
        return 1 if self.step == 0 else actions_of(self.parent)[self.step - 1].index + 2

    def check(self) -> None:
        """Raises ConfigError where the episode cannot go on from there."""
        parent, last = self.parent, last_step(self.parent)
        if last < 0:
            raise ConfigError(f"{parent.episode_id} has no step to branch from: {parent.fault or parent.stop_reason}")
        if not 0 <= self.step <= last:
            raise ConfigError(
                f"--branch {self.step}: {parent.episode_id} can go on from step 0 (its reset) to {last};"
                f" it has {len(actions_of(parent))} and ended as {parent.stop_reason}"
            )

    def faults(self) -> tuple[InjectedFault, ...]:
        """The faults that were put in on the way: they count the steps that reached the world."""
        reached = sum(action.reached_the_world for action in actions_of(self.parent)[: self.step])
        return tuple(fault for fault in self.parent.injected_faults if fault.turn <= reached)


def last_step(parent: Episode) -> int:
    """The last step that an episode can go on from, -1 where there is none."""
    if not parent.turns:
        return -1
    actions = actions_of(parent)
    last = len([each for each in actions if each.answer is not None and each.answer.role is not Role.ASSISTANT])
    if parent.stop_reason in _ENDS and last == len(actions):
        last -= 1  # the answer to the last step is the end
    return min(last, parent.budgets.max_turns - 1)


async def take_up(
    plan: EpisodePlan, environment: AsyncEnvironment, renderer: Renderer, recorder: Recorder, deadline: Deadline
) -> Context:
    """Bring world, record and context to where `plan.prefix` ends after step `plan.branch_step`.

    Raises:
        CannotBranch: the episode cannot go on from there, the world at hand is another one, or it answers otherwise
            than recorded: then the first step is named.
        EnvironmentFault: the same in an episode that is played for training; transient where the world broke.
    """
    if plan.prefix is None or plan.branch_step is None:
        raise CannotBranch("a branch needs an episode and a step of it")
    prefix = Prefix(plan.prefix, plan.branch_step)
    try:
        prefix.check()
        return await _taken_up(prefix, plan, environment, renderer, recorder, deadline)
    except (ConfigError, NotFound) as error:
        raise _refusal(plan, str(error)) from error


def _refusal(plan: EpisodePlan, told: str, transient: bool = False) -> Exception:
    """What to raise: a member of a training group ends by a fault as any other, and its slot may get another try."""
    if plan.attempt_id.purpose is Purpose.TRAIN:
        return EnvironmentFault(f"the episode cannot branch off {_name(plan)}: {told}", transient=transient)
    return CannotBranch(told)


def _name(plan: EpisodePlan) -> str:
    return plan.prefix.episode_id if plan.prefix is not None else "nothing"


async def _taken_up(
    prefix: Prefix,
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    renderer: Renderer,
    recorder: Recorder,
    deadline: Deadline,
) -> Context:
    parent = prefix.parent
    cassette = load_cassette(environment, parent.external)
    limits = Limits(reset_deadline_s=plan.reset_deadline_s, step_deadline_s=plan.step_deadline_s)
    execution = Execution(
        parent, environment, lambda step: f"{recorder.episode_id}/{BRANCH}/{step - 1}", deadline, limits, cassette
    )
    observation = await execution.reset()
    _check(plan, execution)
    context = Context(renderer, environment.tools())
    messages = list(well_formed(observation.messages)) if observation is not None else []
    said = [_as_recorded(messages, parent.turns[0])]
    results: dict[int, StepResult] = {}
    for action in execution.actions[: prefix.step]:
        result = await execution.step(action)
        _check(plan, execution)
        said.append([as_step_message(action.turn)])
        if action.answer is not None:
            answers = list(well_formed(result.messages)) if result is not None else []
            said.append(_as_recorded(answers, action.answer))
        if result is not None:
            results[action.index] = result
    if cassette is not None:
        cassette.release()
    turns = parent.turns[: prefix.length]
    recorder.offered(context.tools)
    recorder.take_up(turns, [view for view in parent.views if view.turn < prefix.length], results)
    context.take_up([message for messages in said for message in messages], turns)
    return context


def _check(plan: EpisodePlan, execution: Execution) -> None:
    if execution.interrupted:
        raise _refusal(plan, f"the world broke, and may not another time: {execution.interrupted}", transient=True)
    for found in execution.differences:
        if found.is_divergence:
            shown = "".join(f"\n    {line}" for line in found.diff)
            told = f"the world diverges at step {found.step}: {found.what} is not as recorded{shown}"
            raise _refusal(plan, told)


def _as_recorded(messages: list[Message], turn: Turn) -> list[Message]:
    """The messages behind a recorded turn, with the recorded text where it is one message: a time in it, say, is the
    recorded one, as in the tokens."""
    if len(messages) == 1:
        return [msgspec.structs.replace(messages[0], content=turn.content)]
    return messages or [Message(turn.role, turn.content, tool_call_id=turn.tool_call_id)]

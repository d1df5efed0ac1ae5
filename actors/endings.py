"""How an episode ended, and whose fault it was: decisions without effects."""

from headrace.actors.deadline import Deadline
from headrace.actors.frames import described, message_of
from headrace.actors.plan import Ending
from headrace.actors.text import well_formed_text
from headrace.platform.errors import (
    DeadlineExceeded,
    EngineError,
    EnvironmentFault,
    InfrastructureFault,
    SafetyBlock,
)
from headrace.platform.records.message import StepResult
from headrace.platform.records.status import FaultOwner, Status, StopReason


def ending_of(answer: StepResult) -> Ending | None:
    """How the world ended the episode, None when it goes on.

    Raises:
        EnvironmentFault: for an answer that ends it in both ways.
    """
    if not (answer.terminated or answer.truncated):
        return None
    if answer.terminated and answer.truncated:
        raise EnvironmentFault("a step is terminated and truncated at once", transient=False)
    if answer.status is Status.SAFETY_BLOCK:  # whichever way it was ended: what was blocked is not graded
        return Ending(StopReason.TERMINATED, answer.status, FaultOwner.SAFETY, "the world ended it for safety")
    if answer.truncated or answer.status.is_truncated:
        return Ending(StopReason.ENV_TRUNCATED, Status.BUDGET_EXHAUSTED)
    return Ending(StopReason.TERMINATED, answer.status)


def classify(error: BaseException, deadline: Deadline, has_acted: bool) -> Ending:
    """What broke, by whoever was waited for.

    A budget that ran out is nobody's fault (P27), provided that the policy had begun to act: an episode without an
    action says nothing about it.

    Args:
        error: what was raised.
        deadline: knows what was waited for, and whether the budget is spent.
        has_acted: the policy has sampled at least one turn.
    """
    waiting_for = deadline.waiting_for
    owner = FaultOwner.INFRASTRUCTURE if waiting_for == "generation" else FaultOwner.ENVIRONMENT
    if isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceeded):
        if deadline.budget_is_spent and has_acted:
            return Ending(StopReason.MAX_SECONDS, Status.BUDGET_EXHAUSTED)
        outran = f"{waiting_for} outran its deadline"
        told = outran if str(error) in ("", outran) else well_formed_text(_cause(error, owner))
        return Ending(StopReason.FAULT, Status.ENV_TRANSIENT, owner, told)
    if isinstance(error, SafetyBlock):
        return Ending(StopReason.FAULT, Status.SAFETY_BLOCK, FaultOwner.SAFETY, well_formed_text(str(error)))
    if isinstance(error, EngineError | InfrastructureFault):
        owner = FaultOwner.INFRASTRUCTURE
    fault = well_formed_text(_cause(error, owner))
    if (
        owner is FaultOwner.INFRASTRUCTURE
        or isinstance(error, DeadlineExceeded)
        or (isinstance(error, EnvironmentFault) and error.transient)
    ):
        return Ending(StopReason.FAULT, Status.ENV_TRANSIENT, owner, fault)
    return Ending(StopReason.FAULT, Status.ENV_BUG, owner, fault)


def _cause(error: BaseException, owner: FaultOwner) -> str:
    """What to tell people: an error of an environment names the file and line of whoever wrote it."""
    if owner is FaultOwner.ENVIRONMENT:
        return described(error)
    return f"{type(error).__name__}: {message_of(error)}"

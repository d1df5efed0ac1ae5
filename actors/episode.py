"""What happens to one episode. Read this file first.

An episode is a conversation between a policy and a world. The world opens it; then, turn by turn, the policy samples
tokens under one pinned version, the tokens are read as a message, the world answers, and the answer is appended to the
context, until the task ends, a budget runs out, or something breaks::

    reset ─► prompt ─► [ sample ─► read ─► step ─► observe ] … ─► end ─► score ─► record

Three things are kept apart here and everywhere: a *mistake of the model* comes back to it as an observation; the *end
of a budget* is a valid, truncated episode (P27); a *fault of the world or the machinery* ends the episode without a
reward, for failure is never a reward.

This file decides; `recorder.py` writes down, `context.py` holds the tokens, and the worker says what to play.
"""

import asyncio
import logging
import time

import msgspec

from headrace.actors.context import Context
from headrace.actors.environments.adapter import AsyncEnvironment
from headrace.actors.plan import AsyncScorer, Ending, EpisodePlan, PlayedEpisode
from headrace.actors.recorder import Recorder
from headrace.platform.contracts import Renderer, TokenGenerator
from headrace.platform.errors import DeadlineExceeded, EngineError, EnvironmentFault
from headrace.platform.records.generation import GenerationRequest
from headrace.platform.records.message import Message, RewardComponent, StepResult
from headrace.platform.records.status import FaultOwner, FinishReason, RewardKind, Role, Status, StopReason
from headrace.platform.seeding import derive_seed, nth_seed

_log = logging.getLogger(__name__)


class _Deadline:
    """One timer for the whole episode, so that every wait has an end at the price of two attributes.

    The timer is armed for the earliest limit seen so far; when it goes off before the present limit it is armed again.
    """

    def __init__(self, timer: asyncio.Timeout, budget_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer, self._call_at = timer, loop.call_at
        self._ends = self._armed = self._due = time.monotonic() + budget_s
        self._handle = self._call_at(self._armed, self._ring)
        self.waiting_for = ""

    def allow(self, what: str, now: float, seconds: float) -> None:
        """From `now` on wait for `what`, at most this long and never beyond the budget."""
        self.waiting_for = what
        due = now + seconds
        self._due = due if due < self._ends else self._ends
        if self._due < self._armed:
            self._arm(self._due)

    @property
    def budget_is_spent(self) -> bool:
        return time.monotonic() >= self._ends

    def disarm(self) -> None:
        self._handle.cancel()

    def _arm(self, when: float) -> None:
        self._handle.cancel()
        self._armed = when
        self._handle = self._call_at(when, self._ring)

    def _ring(self) -> None:
        if time.monotonic() >= self._due:
            self._timer.reschedule(self._due)
        else:
            self._arm(self._due)


async def play_episode(
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    renderer: Renderer,
    generator: TokenGenerator,
    scorer: AsyncScorer | None = None,
) -> PlayedEpisode:
    """Play one episode to its end, whatever that is. Owns `environment` and closes it.

    Only cancellation is raised; every other failure is part of the record.
    """
    recorder = Recorder(episode_id=str(plan.attempt_id))
    began = time.monotonic()  # the event loop's clock
    deadline = None
    try:
        async with asyncio.timeout(None) as timer:
            deadline = _Deadline(timer, plan.budgets.max_seconds)
            ending = await _converse(plan, environment, renderer, generator, recorder, deadline, began)
    except Exception as error:  # the boundary: whatever broke is classified here, once
        ending = _classify(error, deadline)
    finally:
        if deadline is not None:
            deadline.disarm()
        await _let_go(plan, environment, generator, recorder.episode_id)
    episode = recorder.episode(plan, environment.name, environment.version, ending, time.monotonic() - began)
    if ending.owner is not FaultOwner.NONE:
        return PlayedEpisode(episode=episode, rewards=(), score=None)
    if scorer is not None:
        recorder.reward(await scorer.score(plan.task, episode), grader_version=scorer.version)
    if ending.status is Status.BUDGET_EXHAUSTED and not recorder.rewards:
        unreached = RewardComponent(RewardKind.OUTCOME, 0.0, evidence="the budget ended before the task did")
        recorder.reward((unreached,))
    return PlayedEpisode(episode=episode, rewards=tuple(recorder.rewards), score=recorder.score())


async def _converse(
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    renderer: Renderer,
    generator: TokenGenerator,
    recorder: Recorder,
    deadline: _Deadline,
    began: float,
) -> Ending:
    """The turn loop."""
    deadline.allow("reset", began, plan.reset_deadline_s)
    observation = await environment.reset(plan.task, plan.seed)
    context = Context(renderer, environment.tools())
    recorder.prompt(observation, context.open(observation.messages))
    stream = derive_seed(plan.seed, recorder.episode_id)
    while True:
        room = plan.budgets.max_tokens - len(context)
        if room < 1:
            return Ending(StopReason.MAX_TOKENS, Status.BUDGET_EXHAUSTED)
        sampling = plan.sampling
        if sampling.max_new_tokens > room:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        turn = recorder.policy_turns
        key = f"{recorder.episode_id}/0/{turn}"  # P26: episode, attempt, branch, turn
        request = GenerationRequest(
            key=key,
            session=recorder.episode_id,
            token_ids=context.token_ids(),
            version=plan.version.number,
            seed=nth_seed(stream, turn),
            sampling=sampling,
            deadline_s=plan.request_deadline_s,
        )
        started = time.monotonic()
        deadline.allow("generation", started, plan.request_deadline_s)
        generation = await generator.generate(request)
        sampled = time.monotonic()

        said = renderer.parse(generation.token_ids.tolist())
        recorder.sampled(
            generation,
            said,
            view=context.view(len(recorder.turns)),
            key=key,
            sampling=sampling,
            seed=request.seed,
            prompt_tokens=len(context),
            started_s=started - began,
            sampled_s=sampled - began,
        )
        message = Message(Role.ASSISTANT, said.content, said.reasoning, said.tool_calls)
        if said.error:
            answer = StepResult(messages=(Message(Role.TOOL, said.error),), status=Status.MODEL_INVALID_ACTION)
            recorder.stepped(None, answer.status, sampled - began)
        else:
            deadline.allow("step", sampled, plan.step_deadline_s)
            answer = await environment.step(message, key)
            if answer.status.is_error:
                raise EnvironmentFault(f"{environment.name} answered {answer.status}", answer.status.is_retryable)
            recorder.stepped(answer, answer.status, time.monotonic() - began)
        context.said(message, generation.token_ids)
        if answer.messages:
            ended = generation.finish_reason is FinishReason.STOP
            bridge = context.observed(answer.messages, ended, len(recorder.turns))
            recorder.observation(answer, bridge, context.segment, answer.messages[0].role is Role.TOOL)
        if answer.terminated:
            return Ending(StopReason.TERMINATED, answer.status)
        if answer.truncated:
            return Ending(StopReason.ENV_TRUNCATED, Status.BUDGET_EXHAUSTED)
        if recorder.policy_turns >= plan.budgets.max_turns:
            return Ending(StopReason.MAX_TURNS, Status.BUDGET_EXHAUSTED)
        if not answer.messages:
            raise EnvironmentFault(f"{environment.name} returned no observation and did not end", transient=False)


async def _let_go(plan: EpisodePlan, environment: AsyncEnvironment, generator: TokenGenerator, session: str) -> None:
    """Give back the pin, before any grading (P19), and the world. What cannot be given back is logged, not raised."""
    try:
        async with asyncio.timeout(plan.step_deadline_s):
            await generator.release(session)
            await environment.close()
    except Exception as error:
        _log.warning("episode %s could not be closed: %s: %s", session, type(error).__name__, error)


def _classify(error: Exception, deadline: _Deadline | None) -> Ending:
    """Whose fault it was. A budget that ran out is nobody's (P27)."""
    timed_out = isinstance(error, TimeoutError) and not isinstance(error, DeadlineExceeded)
    if timed_out and deadline is not None:
        if deadline.budget_is_spent:
            return Ending(StopReason.MAX_SECONDS, Status.BUDGET_EXHAUSTED)
        owner = FaultOwner.INFRASTRUCTURE if deadline.waiting_for == "generation" else FaultOwner.ENVIRONMENT
        return Ending(StopReason.FAULT, Status.ENV_TRANSIENT, owner, f"{deadline.waiting_for} outran its deadline")
    fault = f"{type(error).__name__}: {error}"
    if isinstance(error, EngineError | DeadlineExceeded):
        return Ending(StopReason.FAULT, Status.ENV_TRANSIENT, FaultOwner.INFRASTRUCTURE, fault)
    if isinstance(error, EnvironmentFault) and error.transient:
        return Ending(StopReason.FAULT, Status.ENV_TRANSIENT, FaultOwner.ENVIRONMENT, fault)
    return Ending(StopReason.FAULT, Status.ENV_BUG, FaultOwner.ENVIRONMENT, fault)

"""What happens to one episode. Read this file first.

An episode is a conversation between a policy and a world. The world opens it; then, turn by turn, the policy samples
tokens under known versions of the weights, the tokens are read as a message, the world answers, and the answer is
appended to the context, until the task ends, a budget runs out, or something breaks::

    reset ─► prompt ─► [ sample ─► read ─► step ─► observe ] … ─► end ─► score ─► record

One that branches off a recorded episode begins with that one's turns instead of a prompt (`replaying/branch.py`).

Three things are kept apart here and everywhere: a *mistake of the model* comes back to it as an observation; the *end
of a budget* is a valid, truncated episode (P27); a *fault of the world or the machinery* ends the episode without a
reward, for failure is never a reward.

Which version that is, the plan's update mode says: STICKY is the planned one throughout; under TURN and INFLIGHT the
engine may answer with a newer one, and from then on the episode asks for no older one.

This file tells the story; `endings.py` says whose fault an end is, `recorder.py` writes down, `context.py` holds the
tokens, `deadline.py` the timer, and the worker says what to play.
"""

import asyncio
import logging
import time
from functools import partial

import msgspec

from headrace.actors.context import Context
from headrace.actors.deadline import Deadline
from headrace.actors.endings import classify, ending_of
from headrace.actors.environments.adapter import AsyncEnvironment, finished
from headrace.actors.plan import AsyncScorer, Ending, EpisodePlan, PlayedEpisode
from headrace.actors.recorder import Recorder
from headrace.actors.replaying.branch import BRANCH, take_up
from headrace.actors.scoring.graded import graded
from headrace.actors.text import well_formed
from headrace.platform.contracts import ParsedMessage, Renderer, TokenGenerator
from headrace.platform.errors import CannotBranch, EngineError, EnvironmentFault
from headrace.platform.records.generation import GenerationRequest
from headrace.platform.records.message import Message, RewardComponent, StepResult
from headrace.platform.records.status import FaultOwner, RewardKind, Role, Status, StopReason
from headrace.platform.seeding import derive_seed, nth_seed

_log = logging.getLogger(__name__)
# Looked up once: before Python 3.12 a member of an enum costs as much as a call, and these are for every turn.
_ASSISTANT, _OK = Role.ASSISTANT, Status.OK


async def play_episode(
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    renderer: Renderer,
    generator: TokenGenerator,
    scorer: AsyncScorer | None = None,
) -> PlayedEpisode:
    """Play one episode to its end, whatever that is. Owns `environment` and closes it.

    Only cancellation is raised, and CannotBranch where the world does not follow the plan's prefix: that is no episode.
    Every other failure is part of the record.
    """
    recorder = Recorder(episode_id=str(plan.attempt_id), newest_version=plan.version.number)
    began = time.monotonic()
    deadline = Deadline(plan.budgets.max_seconds)
    try:
        with deadline:
            ending = await _converse(plan, environment, renderer, generator, recorder, deadline, began)
            deadline.allow("the end", time.monotonic(), plan.step_deadline_s)
            await finished(environment)
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        ending = classify(error, deadline, recorder.policy_turns > 0)
    except CannotBranch:
        raise
    except (Exception, SystemExit) as error:  # the boundary: whatever broke is classified here, once
        ending = classify(error, deadline, recorder.policy_turns > 0)
    finally:
        try:
            await _let_go(plan, environment, generator, recorder.episode_id, deadline)
        except asyncio.CancelledError:  # it came in the middle; both are safe to call twice (case X4)
            await _let_go(plan, environment, generator, recorder.episode_id, deadline)
            raise
        finally:
            deadline.disarm()
    duration_s = time.monotonic() - began
    provenance = environment.provenance
    episode = recorder.episode(plan, environment.name, environment.version, provenance, ending, duration_s)
    if ending.owner is not FaultOwner.NONE:
        return PlayedEpisode(episode=episode, rewards=(), score=None)
    if scorer is not None:
        recorder.reward(await graded(scorer, plan.task, episode), grader_version=scorer.version)
    if ending.status is not _OK and not recorder.is_rewarded:
        unreached = RewardComponent(RewardKind.OUTCOME, 0.0, evidence=f"{ending.status} ended it before the task did")
        recorder.reward((unreached,))
    return PlayedEpisode(episode=episode, rewards=tuple(recorder.rewards), score=recorder.score())


async def _converse(
    plan: EpisodePlan,
    environment: AsyncEnvironment,
    renderer: Renderer,
    generator: TokenGenerator,
    recorder: Recorder,
    deadline: Deadline,
    began: float,
) -> Ending:
    """The turn loop."""
    if plan.prefix is None:
        branch = 0
        deadline.allow("reset", began, plan.reset_deadline_s)
        observation = await environment.reset(plan.task, plan.seed)
        tools = environment.tools()
        recorder.offered(tools)
        context = Context(renderer, tools)
        messages = well_formed(observation.messages)
        recorder.prompt(messages, observation, context.open(messages))
    else:
        branch = BRANCH
        context = await take_up(plan, environment, renderer, recorder, deadline)
    stops = renderer.stop_token_ids
    dice = plan.attempt_id  # without the run's name: the same recipe and seed sample the same again
    sample = dice.sample if plan.sample is None else plan.sample
    stream = derive_seed(plan.seed, dice.purpose, dice.group, sample, dice.attempt)
    while True:
        seen = context.token_ids()
        room = plan.budgets.max_tokens - len(seen)
        if room < 1:
            if not recorder.policy_turns:  # whoever never spoke cannot be judged
                told = f"the prompt has {len(seen)} tokens and budgets.max_tokens is {plan.budgets.max_tokens}"
                raise EnvironmentFault(f"{told}; raise it, or shorten the prompt", transient=False)
            return Ending(StopReason.MAX_TOKENS, Status.BUDGET_EXHAUSTED)
        sampling = plan.sampling
        if sampling.max_new_tokens > room:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
        turn = recorder.policy_turns
        key = f"{recorder.episode_id}/{branch}/{turn}"  # P26: episode, attempt, branch, turn
        request = GenerationRequest(
            key=key,
            session=recorder.episode_id,
            token_ids=seen,
            version=recorder.newest_version,
            seed=nth_seed(stream, turn),
            sampling=sampling,
            deadline_s=plan.request_deadline_s,
            update_mode=plan.update_mode,
        )
        started = time.monotonic()
        deadline.allow("generation", started, plan.request_deadline_s)
        generation = await generator.generate(request)
        sampled = time.monotonic()

        token_ids = generation.token_ids.tolist()
        if not token_ids:
            raise EngineError(f"the engine sampled no token ({generation.finish_reason})")
        said = renderer.parse(token_ids)
        if said.error and not context.tools:  # where there is nothing to call, what looks like a call is an answer
            said = ParsedMessage(renderer.decode(token_ids[:-1] if token_ids[-1] in stops else token_ids))
        view = context.view(len(recorder.turns))
        recorder.sampled(request, generation, said, view, started - began, sampled - began)
        message = Message(_ASSISTANT, said.content, said.reasoning, said.tool_calls)
        if said.error:
            answer = StepResult(messages=(Message(Role.TOOL, said.error),), status=Status.MODEL_INVALID_ACTION)
            recorder.stepped(None, answer.status, sampled - began)
        else:
            deadline.allow("step", sampled, plan.step_deadline_s)
            answer = await environment.step(message, key)
            if answer.status is not _OK and answer.status.is_error:
                raise EnvironmentFault(f"{environment.name} answered {answer.status}", answer.status.is_retryable)
            recorder.stepped(answer, answer.status, time.monotonic() - began)
        context.said(message, generation.token_ids)
        if messages := well_formed(answer.messages):
            # What was sampled decides, not what the engine calls it: the context must close every turn (T6).
            ended = token_ids[-1] in stops
            bridge = context.observed(messages, ended, len(recorder.turns))
            recorder.observation(messages, answer, bridge, context.segment)
        if (ending := ending_of(answer)) is not None:
            return ending
        if recorder.policy_turns >= plan.budgets.max_turns:
            return Ending(StopReason.MAX_TURNS, Status.BUDGET_EXHAUSTED)
        if not messages:
            raise EnvironmentFault(f"{environment.name} returned no observation and did not end", transient=False)


async def _let_go(
    plan: EpisodePlan, environment: AsyncEnvironment, generator: TokenGenerator, session: str, deadline: Deadline
) -> None:
    """Give back the pin, before any grading (P19, P21), and the world, each whatever becomes of the other. What cannot
    be given back is logged, not raised."""
    deadline.lift_budget()
    for what, give_back in (("session", partial(generator.release, session)), ("environment", environment.close)):
        deadline.allow(what, time.monotonic(), plan.step_deadline_s)
        try:
            with deadline:
                await give_back()
        except (Exception, SystemExit) as error:
            _log.warning("episode %s: its %s is not closed: %s: %s", session, what, type(error).__name__, error)


def _is_cancelled() -> bool:
    """Whether this episode was asked to stop, and not merely something that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

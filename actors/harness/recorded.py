"""One episode as a harness plays it: requests come in, turns are recorded, nothing is sampled twice.

::

    request ─► known? ── yes ──────────────► the running generation, or its recorded answer (P24)
                 └ no ─► place ─► bridge or render ─► generate ─► record ─► answer

Owns the record of the conversation and what was asked. A request is recorded when it has been answered, its prompt and
its turn at once, so that a record is never half a turn; one that fails leaves nothing. When an episode ends, and who
grades it, is `play.py`'s business; how requests are matched `matching.py`'s.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.actors.harness.asking import Language, check_messages, fingerprint
from headrace.actors.harness.matching import Conversation, Node, Place, chains
from headrace.actors.harness.replies import answered, read
from headrace.actors.plan import Ending, EpisodePlan
from headrace.actors.recorder import Recorder
from headrace.platform.contracts import Answered, Asked, RefusalCode, TokenGenerator
from headrace.platform.errors import (
    ConfigError,
    DeadlineExceeded,
    DoorRefused,
    EngineError,
    VersionUnavailable,
)
from headrace.platform.records.arrays import I32
from headrace.platform.records.generation import Generation, GenerationRequest
from headrace.platform.records.message import Message, Observation, StepResult
from headrace.platform.records.status import FaultOwner, Role, Status, StopReason, UpdateMode
from headrace.platform.records.turn import View
from headrace.platform.seeding import derive_seed, nth_seed

_MAX_FAILURES = 3  # in a row; a client tries again by itself
_IDLE_SESSIONS = 4  # of agents beside the first: each holds a slot of an engine
_IGNORED = ("temperature", "top_p", "top_k", "seed")


@dataclass(kw_only=True, slots=True)
class _Entry:
    """A request that is being answered, or has been. `node` is what came of it."""

    digest: str
    key: str
    node: Node | None = None
    task: asyncio.Task[Answered] = field(init=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompt:
    """What is sampled from: `ids` whole, of which `new` are not part of the parent's context. `segment` is the agent's,
    and `opens` says that it begins here; `extends` says that the context is the parent's, exactly."""

    place: Place
    ids: I32
    new: I32
    segment: int
    extends: bool
    opens: bool = False


@dataclass(slots=True)
class _Asked:
    """Entries by what they ask and by what the client calls them."""

    by_digest: dict[str, list[_Entry]] = field(default_factory=dict)
    by_key: dict[str, _Entry] = field(default_factory=dict)

    def add(self, entry: _Entry) -> None:
        self.by_digest.setdefault(entry.digest, []).append(entry)
        if entry.key:
            self.by_key[entry.key] = entry

    def forget(self, entry: _Entry) -> None:
        entries = self.by_digest[entry.digest]
        entries.remove(entry)
        if not entries:
            del self.by_digest[entry.digest]
        self.by_key.pop(entry.key, None)


class HarnessEpisode:
    """See the module. Belongs to one event loop.

    Args:
        plan: what decides how it goes; its sampling holds, whatever a client asks for.
        opening: what the world opened with; shown to the harness, which says it to the policy in its own way.
    """

    def __init__(
        self, plan: EpisodePlan, language: Language, generator: TokenGenerator, opening: Observation, began: float
    ) -> None:
        self.plan, self.opening = plan, opening
        self.recorder = Recorder(episode_id=str(plan.attempt_id))
        self.over: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.info: dict[str, Any] = {}
        self.retries = self.segments_opened = 0
        self.ignored: set[str] = set()
        self._language, self._generator, self._began = language, generator, began
        self._conversation, self._asked = Conversation(), _Asked()
        self._serial = self._begun = self._failures = 0
        self._newest = plan.version.number
        self._sessions: dict[str, None] = {}  # in the order of their last use
        dice = plan.attempt_id
        sample = dice.sample if plan.sample is None else plan.sample
        self._stream = derive_seed(plan.seed, dice.purpose, dice.group, sample, dice.attempt)

    @property
    def agents(self) -> int:
        """Lines of conversation in which the policy has spoken."""
        return len({turn.agent_id for turn in self.recorder.turns if turn.is_action})

    async def answer(self, asked: Asked) -> Answered:
        """See `Conversations.answer`."""
        digest = fingerprint(asked)
        while True:
            if self.over.done():
                raise _over()
            entry = self._known(asked, digest)
            if entry is not None:
                self.retries += 1
            else:
                entry = self._begin(asked, digest)
            if entry is not None:
                self.ignored.update(name for name in _IGNORED if getattr(asked.sampling, name) is not None)
                return await self._waited(entry.task)
            changes: set[asyncio.Future[Any]] = {self.over, *self._running()}
            await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)

    def end(self, ending: Ending) -> None:
        """Nothing more is answered. The first end counts."""
        if not self.over.done():
            self.over.set_result(ending)

    async def close(self) -> None:
        """Stop what is being sampled and give the sessions back (P19)."""
        running = self._running()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for session in list(self._sessions):
            del self._sessions[session]
            await self._generator.release(session)

    # --- what was asked before ----------------------------------------------------------------------------------------

    def _known(self, asked: Asked, digest: str) -> _Entry | None:
        """The request that this one asks for again (P24), None where it is a new one."""
        if asked.retry_key:
            entry = self._asked.by_key.get(asked.retry_key)
            if entry is not None and entry.digest != digest:
                raise DoorRefused("this Idempotency-Key belongs to another request", RefusalCode.CONFLICT)
            return entry
        entries = [entry for entry in self._asked.by_digest.get(digest, ()) if not entry.key]
        if not entries:
            return None
        newest = entries[-1]
        was_gone_on_from = newest.node is not None and newest.node.followers > 0
        return None if was_gone_on_from and not asked.is_retry else newest

    async def _waited(self, task: asyncio.Task[Answered]) -> Answered:
        """The answer, which is sampled to its end though nobody waits for it any more."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if waiting is not None and not waiting.cancelling() and self.over.done():
                raise _over() from None
            raise

    # --- sampling -----------------------------------------------------------------------------------------------------

    def _running(self) -> list[asyncio.Task[Answered]]:
        tasks = [entry.task for entries in self._asked.by_digest.values() for entry in entries]
        return [task for task in tasks if not task.done()]

    def _begin(self, asked: Asked, digest: str) -> _Entry | None:
        """None where a budget is spent, but turns are under way: they are part of the episode, and may fail yet."""
        budgets = self.plan.budgets
        if self._begun >= budgets.max_turns:
            if self._running():
                return None
            self.end(Ending(StopReason.MAX_TURNS, Status.BUDGET_EXHAUSTED))
            raise _over()
        prompt = self._prompt(asked, again=digest in self._asked.by_digest)
        room = budgets.max_tokens - len(prompt.ids)
        if room < 1:
            if self._running():
                return None
            raise self._too_long(len(prompt.ids))
        if not self.recorder.tools:
            self.recorder.offered(asked.tools)
        self._conversation.join(prompt.place.agent)
        self._begun += 1
        self._serial += 1
        prompt.place.agent.running += 1
        if prompt.place.parent is not None:
            prompt.place.parent.followers += 1
        serial = self._serial - 1
        entry = _Entry(digest=digest, key=asked.retry_key)
        entry.task = asyncio.create_task(self._sampled(entry, asked, prompt, room, serial))
        entry.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._asked.add(entry)
        return entry

    def _too_long(self, length: int) -> DoorRefused:
        """The end of the budget, which is nobody's fault (P27); but whoever never spoke cannot be judged."""
        told = f"the prompt has {length} tokens and budgets.max_tokens is {self.plan.budgets.max_tokens}"
        if self.recorder.policy_turns:
            self.end(Ending(StopReason.MAX_TOKENS, Status.BUDGET_EXHAUSTED))
        else:
            cause = f"{told}; raise it, or shorten the prompt"
            self.end(Ending(StopReason.FAULT, Status.ENV_BUG, FaultOwner.ENVIRONMENT, cause))
        return DoorRefused(told, RefusalCode.OVER)

    def _prompt(self, asked: Asked, *, again: bool) -> _Prompt:
        """The context to sample from. What was sampled stays as it is: a request that extends it is bridged, and where
        that cannot be exact a new segment is rendered (cases T1, T3, T17)."""
        if asked.prompt is not None:
            ids = self._language.prompt(asked)
            place = self._conversation.place_ids(ids.tobytes(), again=again)
            if place.parent is not None:
                return self._extended(place, ids[len(place.parent.ids) // ids.itemsize :])
            return self._fresh(place, ids)
        check_messages(asked)
        place = self._conversation.place(asked.messages, asked.tools, again=again)
        if place.parent is not None:
            try:
                bridged = self._language.renderer.bridge(place.new, place.parent.ended)
            except ConfigError as error:
                raise DoorRefused(str(error), RefusalCode.INVALID, "messages") from error
            if bridged is not None:
                return self._extended(place, np.array(bridged, np.int32))
        return self._fresh(place, self._language.prompt(asked))

    def _extended(self, place: Place, new: I32) -> _Prompt:
        assert place.parent is not None
        before = np.frombuffer(place.parent.ids, np.int32)
        segment = place.parent.segment if place.agent.name == place.parent.agent else 0
        return _Prompt(place=place, ids=np.concatenate([before, new]), new=new, segment=segment, extends=True)

    def _fresh(self, place: Place, ids: I32) -> _Prompt:
        """A prompt of its own; a new segment where its agent has spoken before."""
        agent = place.agent
        has_spoken = any(turn.agent_id == agent.name and turn.is_action for turn in self.recorder.turns)
        segment = agent.segment + has_spoken
        return _Prompt(place=place, ids=ids, new=ids, segment=segment, extends=False, opens=has_spoken)

    async def _sampled(self, entry: _Entry, asked: Asked, prompt: _Prompt, room: int, serial: int) -> Answered:
        """Sample, record, answer. What fails leaves no trace, and can be asked for again."""
        agent, parent = prompt.place.agent, prompt.place.parent
        is_done = False
        try:
            request = self._request(asked, prompt, room, serial)
            started = time.monotonic()
            generation = await self._generated(request)
            answer, entry.node = self._record(asked, prompt, request, generation, started, serial)
            is_done = True
        finally:
            agent.running -= 1
            if not is_done:
                self._begun -= 1
                if parent is not None:
                    parent.followers -= 1
                self._asked.forget(entry)
        await self._release_idle()
        return answer

    def _request(self, asked: Asked, prompt: _Prompt, room: int, serial: int) -> GenerationRequest:
        plan = self.plan
        limit = min(plan.sampling.max_new_tokens, room, asked.sampling.max_tokens or room)
        name = prompt.place.agent.name
        session = f"{self.recorder.episode_id}/{name}" if name else self.recorder.episode_id
        self._sessions.pop(session, None)
        self._sessions[session] = None
        return GenerationRequest(
            key=f"{self.recorder.episode_id}/0/{serial}",  # P26: episode, attempt, branch, turn
            session=session,
            token_ids=prompt.ids,
            version=self._newest,
            seed=nth_seed(self._stream, serial),
            sampling=msgspec.structs.replace(plan.sampling, max_new_tokens=limit),
            deadline_s=plan.request_deadline_s,
            update_mode=plan.update_mode,
        )

    async def _generated(self, request: GenerationRequest) -> Generation:
        """Ends the episode where it cannot go on; short of that a client may ask again."""
        try:
            async with asyncio.timeout(request.deadline_s):
                generation = await self._generator.generate(request)
            if not len(generation.token_ids):
                raise EngineError(f"the engine sampled no token ({generation.finish_reason})")
        except TimeoutError as error:
            self._failed(error, "generation outran its deadline")
            raise DeadlineExceeded(f"nothing was sampled within {request.deadline_s:g} s") from error
        except EngineError as error:
            self._failed(error, f"{type(error).__name__}: {error}")
            raise
        self._failures = 0
        return generation

    def _failed(self, error: Exception, cause: str) -> None:
        self._failures += 1
        if isinstance(error, VersionUnavailable) or self._failures >= _MAX_FAILURES:
            self.end(Ending(StopReason.FAULT, Status.ENV_TRANSIENT, FaultOwner.INFRASTRUCTURE, cause))

    async def _release_idle(self) -> None:
        busy = {f"{self.recorder.episode_id}/{each.name}" for each in self._conversation.agents if each.running}
        idle = [each for each in self._sessions if each != self.recorder.episode_id and each not in busy]
        for session in idle[:-_IDLE_SESSIONS]:
            del self._sessions[session]
            await self._generator.release(session)

    # --- recording ----------------------------------------------------------------------------------------------------

    def _record(
        self,
        asked: Asked,
        prompt: _Prompt,
        request: GenerationRequest,
        generation: Generation,
        started: float,
        serial: int,
    ) -> tuple[Answered, Node]:
        """The prompt and the turn, both at once."""
        sampled_s, recorder = time.monotonic() - self._began, self.recorder
        renderer, agent, parent = self._language.renderer, prompt.place.agent, prompt.place.parent
        ids = generation.token_ids.tolist()
        said = read(renderer, ids, has_tools=bool(asked.tools), is_text=asked.prompt is not None)
        answer = answered(asked, renderer, prompt.ids, generation, said, serial)
        chain = chains((*asked.messages, answer.message), asked.tools)[-1]
        if prompt.opens:
            agent.segment = prompt.segment
            self.segments_opened += 1
        self._record_prompt(asked, prompt)
        index = len(recorder.turns)
        before = parent.shown if parent is not None and prompt.extends else ()
        shown = (*before, index - 1)
        view = View(index, _spans(shown), prompt.segment)
        recorder.sampled(request, generation, said, view, started - self._began, sampled_s)
        state = StepResult(state_hash=recorder.state_hash)
        status = Status.MODEL_INVALID_ACTION if said.error else Status.OK
        recorder.stepped(None if said.error else state, status, sampled_s)
        self._own(agent.name)
        if self.plan.update_mode is not UpdateMode.STICKY:  # P22: versions never go back within an episode
            self._newest = max([self._newest, *(span.version.number for span in generation.version_spans)])
        node = Node(
            chain=chain,
            ids=prompt.ids.tobytes() + np.asarray(generation.token_ids, np.int32).tobytes(),
            shown=(*shown, index),
            agent=agent.name,
            segment=prompt.segment,
            ended=ids[-1] in renderer.stop_token_ids,
            calls=tuple(call.call_id for call in said.tool_calls),
        )
        self._conversation.add(node, raw=asked.prompt is not None)
        return answer, node

    def _record_prompt(self, asked: Asked, prompt: _Prompt) -> None:
        messages: Sequence[Message] = prompt.place.new if prompt.extends else asked.messages
        if asked.prompt is not None:
            messages = (Message(Role.USER, self._language.renderer.decode(prompt.new.tolist())),)
        if not self.recorder.turns:
            self.recorder.prompt(messages, self.opening, prompt.new)
        else:
            result = StepResult(state_hash=self.recorder.state_hash)
            self.recorder.observation(messages, result, prompt.new, prompt.segment)
        self._own(prompt.place.agent.name)

    def _own(self, agent: str) -> None:
        """The newest turn is this agent's (case T18)."""
        if agent:
            self.recorder.turns[-1] = msgspec.structs.replace(self.recorder.turns[-1], agent_id=agent)


def _over() -> DoorRefused:
    return DoorRefused("the episode is over", RefusalCode.OVER)


def _spans(shown: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Turn indices as half-open ranges, in the order shown."""
    spans: list[tuple[int, int]] = []
    for index in shown:
        if spans and spans[-1][1] == index:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return tuple(spans)

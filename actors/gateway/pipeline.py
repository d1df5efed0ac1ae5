"""What happens to the calls of a turn, in this order.

::

    known key? ── yes ─► what was answered before; or conflict, in doubt, still at it (P25)
        │ no
    decisions on each call, in turn (judging)            a turn that waits for nothing is decided without a task
        │
    counts and audit (accounts) ► durable, where a call is strong             before any effect (P25)
        │
    performed here, all at once (performing) ► audit, journal ► durable       or: whoever asked performs, and settles
        │
    verdicts, in the order of the calls

A known key comes first, because a call that comes again must not spend a budget again. All calls of a turn are decided
before any of them is performed. The journal has the turns with a strong call (see `is_strong`) and those that were
performed here; of all others nothing is lost with the process that could not be decided again.

A session that is closed ends what waits, and waits for what is decided; no effect is begun for it, nor for a caller
that does not wait any more.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from headrace.actors.gateway.accounts import Accounts, Decided
from headrace.actors.gateway.audit.log import AuditLog
from headrace.actors.gateway.decisions import taint
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.decisions.tier import tier_of
from headrace.actors.gateway.journal import Journal
from headrace.actors.gateway.judging import Judge
from headrace.actors.gateway.performing import Performing
from headrace.actors.gateway.sessions import Session, Turn
from headrace.actors.gateway.shown import is_strong, result_of
from headrace.actors.gateway.spent import count
from headrace.platform.contracts import Audited, CallVerdict, ToolOutput, ToolResult
from headrace.platform.errors import GatewayAway, InDoubt, SafetyBlock
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.status import SideEffectTier

_encode = msgspec.msgpack.Encoder().encode
_READ = SideEffectTier.READ
_OVER = "its session is over"
_NOT_BEGUN = "gateway:not_begun"
Verdicts = Sequence[CallVerdict]


class Pipeline:
    """Decides for all sessions of a process.

    Args:
        audit: has an entry of everything that is decided.
        journal: outlives the process.
        judge: decides on a call.
        performing: performs the calls of the gateway's own tools.
        each: nothing is given out before its entry is on disk, not even a read.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        audit: AuditLog,
        journal: Journal,
        judge: Judge,
        performing: Performing,
        *,
        each: bool,
        clock: Callable[[], float],
    ) -> None:
        self._audit, self._journal, self._judge, self._performing = audit, journal, judge, performing
        self._accounts = Accounts(audit)
        self._each, self._clock = each, clock

    @property
    def failure(self) -> OSError | None:
        """What ended audit or journal, and with it all that this process can do; None as long as it goes well."""
        return self._audit.failure or self._journal.failure

    async def decide(self, session: Session, calls: Sequence[ToolCall], key: str) -> Verdicts:
        """See `ToolSession.decide`. A caller that is cancelled does not undo."""
        begun = self.begin(session, calls, key)
        return await asyncio.shield(begun) if isinstance(begun, asyncio.Task) else begun

    def begin(
        self, session: Session, calls: Sequence[ToolCall], key: str, until_s: float = 0.0
    ) -> Verdicts | asyncio.Task[Verdicts]:
        """As `decide`: the verdicts where they can be had at once, else the task that comes to them.

        After `until_s` on the clock no effect is begun, where it is not 0; the task raises GatewayAway then.

        Raises:
            ValueError, InDoubt, SafetyBlock: as `ToolSession.decide`.
            ConfigError: a tool or a grant is not what it can be.
            OSError: audit or journal cannot be written: nothing is allowed.
        """
        calls_hash = hashlib.blake2b(_encode(calls), digest_size=16).digest()
        turn, until_s = session.turns.get(key), until_s or float("inf")
        if turn is not None:
            turn.until_s = max(turn.until_s, until_s)
        if turn is not None and (answer := self._again(session, turn, key, calls_hash, len(calls))) is not None:
            return answer
        if session.blocked:
            raise SafetyBlock(session.blocked)
        if session.closing is not None:
            raise SafetyBlock(_OVER)
        turn = session.turns[key] = Turn(calls_hash, until_s=until_s)
        if session.learned.ready and not (session.resumed or self._each):
            asked = self._asked(session.begun or session.state(self._clock()), calls, key)
            if not self._judge.waits(session, asked):
                return self._at_once(session, turn, key, asked)
        turn.running = asyncio.get_running_loop().create_task(self._slowly(session, turn, calls, key))
        turn.running.add_done_callback(partial(_ran, session, turn, key))
        return turn.running

    def recorded(self, session: Session, calls: Sequence[ToolCall], number: int) -> None:
        """See `ToolSession.recorded`; the same number again has no effect.

        Raises:
            OSError: the audit cannot be written.
        """
        if number > session.recorded and session.closing is None:
            self._accounts.recorded(session, calls)
            session.take_recorded(calls)
            session.recorded = number

    def settle(self, session: Session, outputs: Sequence[ToolOutput], key: str) -> asyncio.Task[None] | None:
        """What the allowed calls of a turn gave, as the model sees it; the task to wait for where that has to be on
        disk. Again under the same key it has no effect. The session's tools are ready.

        Raises:
            OSError: audit or journal cannot be written.
        """
        turn, state = session.turns.get(key), session.begun or session.state(self._clock())
        if turn is None or len(turn.owed) != len(outputs):
            return self._settle_unknown(session, state, turn, outputs, key)
        owed, turn.owed = turn.owed, ()
        results = [result_of(each.call, each.spec, output) for each, output in zip(owed, outputs, strict=True)]
        for each, result in zip(owed, results, strict=True):
            self._given(session, state, each, result)
        strong = any(is_strong(each.spec) for each in owed)
        if strong and turn.verdicts is not None:
            given = iter(results)
            filled = [_with(each, next(given)) if each.result is None else each for each in turn.verdicts]
            self._keep(session, turn, key, filled, effects=True)
        return self._waiting(turn) if strong or self._each else None

    def _settle_unknown(
        self, session: Session, state: EpisodeState, turn: Turn | None, outputs: Sequence[ToolOutput], key: str
    ) -> asyncio.Task[None] | None:
        """Outputs of calls that were decided by a record or by a process that is gone, or that were settled before."""
        if turn is not None and not turn.owed:
            return turn.settling
        for output in outputs:
            taint.remember(state, output.content, "tool")
            self._accounts.given_elsewhere(session, key, output)
        turn = turn if turn is not None else Turn(b"")
        turn.owed = ()
        return self._waiting(turn)

    def give_up(self, session: Session) -> None:
        """Nobody waits for what the session is asked any more: end what is not decided. It may be asked again."""
        for turn in session.turns.values():
            if turn.running is not None and not turn.is_decided:
                turn.running.cancel()

    def close(self, session: Session) -> asyncio.Task[Audited]:
        """See `ToolSession.close`. Raises OSError where audit or journal have failed: nobody knows then what of the
        session's calls is on disk."""
        closing = session.closing
        if closing is None or (closing.done() and (closing.cancelled() or closing.exception() is not None)):
            closing = session.closing = asyncio.get_running_loop().create_task(self._close(session))
        return closing

    async def _close(self, session: Session) -> Audited:
        while running := {turn.running for turn in session.turns.values() if turn.running is not None}:
            self.give_up(session)
            await asyncio.wait(running)
            await asyncio.sleep(0)  # so that they are known to be over
        await self._performing.end(session.scope)
        head = ""
        if self.failure is not None:
            raise self.failure
        if session.is_written or session.calls_before:
            await self._audit.durable(self._accounts.closed(session))
            head = self._audit.head
        session.audited = self._accounts.audited(session, head)
        return session.audited

    # --- the two ways through a turn ----------------------------------------------------------------------------------

    def _at_once(self, session: Session, turn: Turn, key: str, asked: Sequence[Asked]) -> Verdicts:
        try:
            decided = [(each, self._judge.now(each, session)) for each in asked]
            verdicts = self._accounts.decided(session, decided)
        except BaseException:
            del session.turns[key]
            raise
        if session.blocked:
            turn.failure = SafetyBlock(session.blocked)
            raise turn.failure
        turn.owed = [each for each, denial in decided if denial is None]
        turn.verdicts = verdicts
        return verdicts

    async def _slowly(self, session: Session, turn: Turn, calls: Sequence[ToolCall], key: str) -> Verdicts:
        try:
            await session.learned.loaded()
            asked = self._asked(session.state(self._clock()), calls, key)
            if session.resumed and (known := self._recalled(session, turn, key, asked)) is not None:
                return known
            decided = await self._judge.slowly(asked, session)
        except asyncio.CancelledError:
            self._may_begin(session, turn)
            raise
        self._may_begin(session, turn)
        turn.is_decided = True
        verdicts: Verdicts = self._accounts.decided(session, decided)
        turn.acts = not session.blocked and any(denial is None and is_strong(each.spec) for each, denial in decided)
        if turn.acts:
            self._journal.intent(session.scope, key, turn.calls_hash)
        was_blocked = bool(session.blocked)
        if self._each or any(is_strong(each.spec) for each in asked):
            await self._durable(turn.acts)  # P25: before the effect, and before anybody is told to have it
        try:
            if session.blocked:
                raise SafetyBlock(session.blocked)
            self._may_begin(session, turn)
        except (SafetyBlock, GatewayAway):
            if not was_blocked:  # else it was denied
                self._not_begun(session, turn, key, decided)
            raise
        turn.owed = [each for each, denial in decided if denial is None and not each.here]
        turn.verdicts = verdicts
        if any(each.here and denial is None for each, denial in decided):
            verdicts = await self._performed(session, turn, key, decided)
        return verdicts

    def _not_begun(self, session: Session, turn: Turn, key: str, decided: Decided) -> None:
        """Allowed calls do not happen after all: a process that comes later is in no doubt, and may decide anew."""
        for each, denial in decided:
            if denial is None:
                self._accounts.not_begun(session, each, _NOT_BEGUN)
        if turn.acts:
            self._journal.not_begun(session.scope, key, turn.calls_hash)
            turn.acts = False

    async def _performed(self, session: Session, turn: Turn, key: str, decided: Decided) -> Verdicts:
        """The verdicts of a turn with the results of what is performed here, all at once."""
        state, verdicts = session.state(self._clock()), list(turn.verdicts or ())
        here = [index for index, (each, denial) in enumerate(decided) if each.here and denial is None]
        results = await asyncio.gather(
            *[self._performing.perform(decided[index][0], state) for index in here], return_exceptions=True
        )
        for index, result in zip(here, results, strict=True):
            given = result if isinstance(result, ToolResult) else None
            self._given(session, state, decided[index][0], given)
            if given is not None:
                verdicts[index] = _with(verdicts[index], given, lasting=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            if turn.acts:
                await self._durable(False)
            if turn.acts and not isinstance(failed[0], InDoubt):
                raise InDoubt(f"of the calls of {key} some were made, and one failed: {failed[0]}") from failed[0]
            raise failed[0]
        self._keep(session, turn, key, verdicts, effects=turn.acts)
        if self._each or turn.acts:
            await self._durable(True)
        if session.blocked:
            raise SafetyBlock(session.blocked)
        return verdicts

    # --- known keys ---------------------------------------------------------------------------------------------------

    def _again(
        self, session: Session, turn: Turn, key: str, calls_hash: bytes, count: int
    ) -> Verdicts | asyncio.Task[Verdicts] | None:
        """The answer to a key that came before; None where it was not kept, as the calls may run again."""
        if turn.calls_hash != calls_hash:
            raise ValueError(f"the key {key!r} belongs to other calls")
        if session.begun is not None:
            session.begun.duplicates += count
        if turn.running is not None:  # at it: attach
            return turn.running
        if turn.failure is not None:
            raise type(turn.failure)(str(turn.failure))
        if turn.verdicts is not None:
            return turn.verdicts
        known = self._journal.known(session.scope, key)
        return known.verdicts if known is not None and not known.again else None

    def _recalled(self, session: Session, turn: Turn, key: str, asked: Sequence[Asked]) -> Verdicts | None:
        """What a process that is gone has left of a key (P25, P26); None for what has to be decided, as nothing of it
        was begun, or nothing was more than a read."""
        known = self._journal.known(session.scope, key)
        if known is None:
            return None
        if known.calls_hash != turn.calls_hash:
            raise ValueError(f"the key {key!r} belongs to other calls")
        state = session.state(self._clock())
        state.duplicates += len(asked)
        if known.state == "not_begun":
            return None
        if known.verdicts and all(each.result is not None for each in known.verdicts):
            for each, verdict in zip(asked, known.verdicts, strict=True):
                if (result := verdict.result) is not None and result.decision == "allow":
                    count(state, each.spec)  # whoever asks again has not had the answer, and has not counted it
                    if not result.trusted:
                        taint.remember(state, result.content, result.source)
            return known.verdicts
        if any(tier_of(each.spec) is not _READ for each in asked):
            turn.acts = True
            raise InDoubt(f"{asked[0].call.name}: the gateway ended before it had a result under the key {key}")
        return None  # reads run again

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _may_begin(self, session: Session, turn: Turn) -> None:
        """Raises SafetyBlock where the session is over, and GatewayAway where nobody waits for the turn any more."""
        if session.closing is not None:
            raise SafetyBlock(_OVER)
        if self._clock() >= turn.until_s:
            raise GatewayAway("it was not decided in time, and did not happen")

    @staticmethod
    def _asked(state: EpisodeState, calls: Sequence[ToolCall], key: str) -> list[Asked]:
        specs, mounted = state.specs, state.mounted
        return [
            Asked(call, specs.get(call.name) or ToolSpec(call.name), f"{key}/{index}", call.name in mounted)
            for index, call in enumerate(calls)
        ]

    def _given(self, session: Session, state: EpisodeState, asked: Asked, result: ToolResult | None) -> None:
        self._accounts.given(session, asked, result)
        if result is not None and not result.trusted:
            taint.remember(state, result.content, result.source)

    def _keep(self, session: Session, turn: Turn, key: str, verdicts: Verdicts, effects: bool) -> None:
        """From now on the journal has them: contents in memory are its to bound. What the caller still owes is not
        known to it, so that a turn with that stays in memory until it is settled."""
        self._journal.decided(session.scope, key, turn.calls_hash, verdicts, effects)
        turn.verdicts = verdicts if turn.owed else None

    def _waiting(self, turn: Turn) -> asyncio.Task[None]:
        turn.settling = asyncio.get_running_loop().create_task(self._durable(True))
        return turn.settling

    async def _durable(self, journal: bool) -> None:
        audit = self._audit.durable()
        if journal:
            await self._journal.durable()
        await audit


def _with(verdict: CallVerdict, result: ToolResult, lasting: bool = False) -> CallVerdict:
    return msgspec.structs.replace(verdict, result=result, lasting=lasting or verdict.lasting)


def _ran(session: Session, turn: Turn, key: str, task: asyncio.Task[Verdicts]) -> None:
    """A task is over: what it came to is the key's, unless nothing happened and it may be tried again."""
    turn.running = None
    if task.cancelled():
        if turn.is_decided:
            turn.failure = GatewayAway("the gateway ended")
        else:
            session.turns.pop(key, None)
    elif (error := task.exception()) is not None:
        if turn.acts or isinstance(error, SafetyBlock | InDoubt):
            turn.failure = error
        else:
            session.turns.pop(key, None)

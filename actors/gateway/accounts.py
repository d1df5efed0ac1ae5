"""What is counted and written of an episode's calls: its safety counts and its entries in the audit.

Every call that is decided has one "decision"; a strong one that is allowed has an "intent" beside it, before its effect
(P25); whatever was performed has a "result". Nothing of arguments and results is written but their hashes.
"""

import logging
from collections.abc import Sequence

from headrace.actors.gateway.audit.log import AuditLog
from headrace.actors.gateway.decisions.asked import Asked, Denial
from headrace.actors.gateway.decisions.tier import tier_of
from headrace.actors.gateway.judging import UNDECIDED
from headrace.actors.gateway.sessions import Session
from headrace.actors.gateway.shown import OUTSIDE, denied, is_strong
from headrace.platform.contracts import Audited, CallVerdict, ToolOutput, ToolResult
from headrace.platform.records.message import ToolCall
from headrace.platform.records.permissions import Safety
from headrace.platform.records.status import SideEffectTier

_log = logging.getLogger(__name__)
_CLOCKS = ("tier:approval", "budget:rate", "capability:expired")
_READ, _IRREVERSIBLE = SideEffectTier.READ, SideEffectTier.IRREVERSIBLE
_ALLOWED = {tier: CallVerdict(None, tier, (), tier is _IRREVERSIBLE) for tier in SideEffectTier}
Decided = Sequence[tuple[Asked, Denial | None]]


class Accounts:
    """Keeps them in `audit`. All of its methods raise OSError where the audit has failed: then nothing is allowed."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def recorded(self, session: Session, calls: Sequence[ToolCall]) -> None:
        """A replay takes calls from the record."""
        self._opened(session)
        for call in calls:
            name = call.name if call.name in session.learned.specs else ""
            hashed = self._audit.digest(call.arguments)
            self._audit.append("recorded", session.scope, name=name, caller=session.caller, arguments_hash=hashed)

    def decided(self, session: Session, decided: Decided) -> list[CallVerdict]:
        """Count and write the decisions of a turn. Sets `session.blocked` where it was one too many: then nothing of
        the turn happens."""
        self._opened(session)
        session.calls += len(decided)
        for _, denial in decided:
            if denial is not None and not denial.invalid:
                self._violated(session, denial.rule, denial.told)
        for asked, denial in decided:
            self._write(session, asked, denial)
        return [_verdict(asked, denial) for asked, denial in decided]

    def given(self, session: Session, asked: Asked, result: ToolResult | None) -> None:
        """What a call gave; None where nobody knows."""
        said, rule, content = "in_doubt", "", ""
        if result is not None:
            said, rule, content = _came_to(result), result.rule, result.content
        if rule:  # a tool that is performed here found a reason to refuse, or to stop
            self._violated(session, rule, content)
            if asked.taint and asked.spec.capability in OUTSIDE and session.begun is not None:
                session.begun.exfiltration += 1
        self._audit.append(
            "result",
            session.scope,
            asked.key,
            asked.spec.name,
            decision=said,
            rule=rule,
            tier=tier_of(asked.spec),
            capability=asked.spec.capability,
            result_hash=self._audit.digest(content),
        )

    def not_begun(self, session: Session, asked: Asked, rule: str) -> None:
        """An allowed call did not happen after all, through no fault of its own."""
        self._audit.append("result", session.scope, asked.key, asked.spec.name, decision="deny", rule=rule)

    def given_elsewhere(self, session: Session, key: str, output: ToolOutput) -> None:
        """The same of a call that was decided elsewhere."""
        said = "allow" if output.ok else "failed"
        self._audit.append("result", session.scope, key, decision=said, result_hash=self._audit.digest(output.content))

    def closed(self, session: Session) -> int:
        """A session is over; the number of its last entry."""
        return self._audit.append("close", session.scope, caller=session.caller)

    @staticmethod
    def audited(session: Session, head: str) -> Audited:
        """What the episode's record keeps."""
        counted = Safety(calls=session.calls)
        if (state := session.begun) is not None:
            counted = Safety(
                calls=session.calls,
                violations=state.violations,
                blocked=dict(state.blocked),
                exfiltration=state.exfiltration,
                duplicates=state.duplicates,
            )
        return Audited(head, counted, session.learned.policy.digest)

    def _opened(self, session: Session) -> None:
        """A session's first call has come."""
        if not session.is_written:
            digest = session.learned.policy.digest
            self._audit.append("open", session.scope, caller=session.caller, result_hash=digest)
            session.is_written = True

    @staticmethod
    def _violated(session: Session, rule: str, told: str) -> None:
        state, policy = session.begun, session.learned.policy
        assert state is not None
        state.violations += 1
        state.blocked[rule] = state.blocked.get(rule, 0) + 1
        if rule == UNDECIDED:
            session.blocked = told
        elif policy.on_block == "end":
            session.blocked = session.blocked or f"{rule}: {told}"
        elif policy.max_violations and state.violations >= policy.max_violations:
            session.blocked = session.blocked or f"{state.violations} calls were denied, the last one by {rule}"

    def _write(self, session: Session, asked: Asked, denial: Denial | None) -> None:
        spec, scope, key = asked.spec, session.scope, asked.key
        allowed = denial is None and not session.blocked
        arguments_hash = self._audit.digest(asked.call.arguments)
        self._audit.append(
            "decision",
            scope,
            key,
            spec.name if asked.call.name in session.learned.specs else "",
            caller=session.caller,
            decision="allow" if allowed else "deny",
            rule=denial.rule if denial is not None else "" if allowed else "gateway:ended",
            tier=tier_of(spec),
            capability=spec.capability,
            taint=asked.taint,
            arguments_hash=arguments_hash,
            cost=spec.price if allowed else 0.0,
        )
        if allowed and is_strong(spec):
            self._audit.append("intent", scope, key, spec.name, arguments_hash=arguments_hash)


def _came_to(result: ToolResult) -> str:
    """What the audit says of a call that was allowed: "stopped" is one that a rule ended on its way."""
    if result.rule:
        return "deny" if result.decision == "deny" else "stopped"
    return "allow" if result.ok else "failed"


def _verdict(asked: Asked, denial: Denial | None) -> CallVerdict:
    tier, taint = tier_of(asked.spec), asked.taint
    if denial is not None:
        return CallVerdict(denied(denial), tier, taint, denial.rule.startswith(_CLOCKS))
    return CallVerdict(None, tier, taint, tier is _IRREVERSIBLE) if taint else _ALLOWED[tier]

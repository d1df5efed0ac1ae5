"""The worker's side of the gateway: sessions for episodes, over one connection to the process of this node.

::

    session.decide ─► Learn, Open, Decide in one write ─► answer by number
    connection lost ─► connect or start again ─► Open again, what was not answered again, under the same keys (P25)
    no answer within the deadline ─► GatewayAway: the call does not happen, as the process knows the deadline too

Nothing is decided here. A session makes results of outputs by the functions that the process has too (`shown`), and
tells the process what the model is shown; for reads it does not wait for an answer to that, since what comes next on
the connection comes after it. Whoever is cancelled undoes nothing.
"""

import asyncio
import itertools
import time
import weakref
from collections.abc import Sequence

from headrace.actors.gateway.decisions.tier import needs_approval
from headrace.actors.gateway.framing import encode
from headrace.actors.gateway.launch import Launch
from headrace.actors.gateway.link import Link, Opened
from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.protocol import (
    Close,
    Closed,
    Decide,
    Learn,
    Mounted,
    Open,
    Recorded,
    Settle,
    Specs,
    Verdicts,
)
from headrace.actors.gateway.sessions import digest_of
from headrace.actors.gateway.shown import UNSENDABLE, is_strong, shown
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.contracts import Audited, CallVerdict, ToolOutput, ToolResult
from headrace.platform.errors import GatewayAway
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant

START_S = 30.0
MOUNT_S = 60.0
_HOLD_S = 0.05
_MOST_LEARNED = 64
_MOST_OWED = 8


class GatewayClient:
    """Sessions with one gateway process; one connection for each event loop that uses it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._links: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Link] = weakref.WeakKeyDictionary()
        self._last: Link | None = None  # nearly always the one that is wanted
        self._numbers = itertools.count(1)
        self._learned: dict[tuple[int, ...], _Tools] = {}

    @property
    def config(self) -> GatewayConfig:
        """That of the process."""
        return self._launch.config

    async def up(self, within_s: float = START_S) -> None:
        """Wait until there is a connection. Raises GatewayAway."""
        await self.link().up(within_s)

    async def mounted(self, mounts: tuple[Mount, ...]) -> tuple[ToolSpec, ...]:
        """The tools behind mounts that the gateway performs itself.

        Raises:
            GatewayAway: it cannot be reached, or a tool does not get ready in time.
            EnvironmentFault: the mounts are not as they have to be.
        """
        answer = await self.link().ask(lambda seq: Mounted(seq, mounts), None, MOUNT_S)
        assert isinstance(answer, Specs)
        return answer.tools

    def session(
        self,
        scope: str,
        policy: Policy,
        tools: Sequence[ToolSpec],
        grants: tuple[Grant, ...] = (),
        trusted: tuple[str, ...] = (),
    ) -> "GatewaySession":
        """A session, which the gateway learns of by the first decision.

        Args:
            scope: unique to it (P26).
            policy: what the gateway decides by.
            tools: all but those that the gateway performs.
            grants: the task's own.
            trusted: texts of the task.
        """
        known = self._tools(policy, tools)
        opened = Open(next(self._numbers), scope, known.learn.digest, grants, trusted)
        return GatewaySession(self, known, Opened(known.learn, opened))

    def link(self) -> Link:
        """The connection of the running loop."""
        loop = asyncio.get_running_loop()
        last = self._last
        if last is not None and last.loop is loop:
            return last
        link = self._links.get(loop)
        if link is None:
            link = self._links[loop] = Link(self._launch, min(_HOLD_S, self.config.flush_s))
        self._last = link
        return link

    async def close(self) -> None:
        """Hang up, in the loop that is running. The process ends a while after the last one has."""
        self._last = None
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.close()

    def _tools(self, policy: Policy, tools: Sequence[ToolSpec]) -> "_Tools":
        """Remembered by identity, since sessions of one environment share policy and tools."""
        identity = (id(policy), *map(id, tools))
        known = self._learned.get(identity)
        if known is None:
            while len(self._learned) >= _MOST_LEARNED:
                del self._learned[next(iter(self._learned))]
            known = self._learned[identity] = _Tools(policy, tuple(tools))
        return known


class _Tools:
    """A policy with an environment's tools, in the form in which the process learns them."""

    def __init__(self, policy: Policy, tools: tuple[ToolSpec, ...]) -> None:
        self.learn = Learn(digest_of(policy, tools), policy, tools)
        self.by_name = {tool.name: tool for tool in tools}


class GatewaySession:
    """See `ToolSession`."""

    def __init__(self, client: GatewayClient, tools: _Tools, opened: Opened) -> None:
        self._client, self._tools, self._opened = client, tools, opened
        self._number, self._policy = opened.open.session, tools.learn.policy
        self._deadline_s, self._is_each = client.config.deadline_s, client.config.audit == "each"
        self._owed: dict[str, list[tuple[ToolCall, ToolSpec]]] = {}
        self._has_begun = False
        self._audited: Audited | None = None

    async def decide(self, calls: Sequence[ToolCall], key: str) -> Sequence[CallVerdict]:
        """See `ToolSession.decide`."""
        self._has_begun = True
        link, sent = self._client.link(), tuple(calls)
        if not all(isinstance(call.arguments, dict) for call in sent):  # the other side would hang up on everybody
            sent = tuple([_sendable(call) for call in calls])
        within_s = self._within_s(sent)
        until_s = time.monotonic() + within_s
        self._opened.began_s = self._opened.began_s or time.monotonic()
        try:
            answer = await link.ask(lambda seq: Decide(seq, self._number, key, sent, until_s), self._opened, within_s)
        except (OverflowError, UnicodeEncodeError):
            sent = tuple([_sendable(call) for call in calls])
            answer = await link.ask(lambda seq: Decide(seq, self._number, key, sent, until_s), self._opened, within_s)
        assert isinstance(answer, Verdicts)
        if len(answer.verdicts) != len(calls):
            raise GatewayAway(f"the gateway decided on {len(answer.verdicts)} of {len(calls)} calls")
        if key not in self._owed:
            allowed = [
                call
                for call, verdict in zip(sent, answer.verdicts, strict=True)
                if verdict.result is None or verdict.result.decision == "allow"
            ]
            self._opened.count(sent, allowed)
        self._owed[key] = [
            (call, self._tools.by_name[call.name])
            for call, verdict in zip(calls, answer.verdicts, strict=True)
            if verdict.result is None
        ]
        if len(self._owed) > _MOST_OWED:
            del self._owed[next(iter(self._owed))]
        return answer.verdicts

    def recorded(self, calls: Sequence[ToolCall]) -> None:
        """See `ToolSession.recorded`. It comes before whatever is asked next."""
        if not calls:
            return
        self._has_begun = True
        sent, opened = tuple([_sendable(call) for call in calls]), self._opened
        opened.recorded += 1
        opened.began_s = opened.began_s or time.monotonic()
        opened.count(sent, sent)
        self._client.link().tell(Recorded(self._number, opened.recorded, sent), opened)

    async def settle(self, outputs: Sequence[ToolOutput], key: str) -> Sequence[ToolResult]:
        """See `ToolSession.settle`. Of calls that a record decided it knows no more than that they gave this."""
        self._has_begun = True
        owed = self._owed.get(key, [])
        if len(owed) != len(outputs):
            owed = [(ToolCall("unknown"), ToolSpec("unknown"))] * len(outputs)
        results = [shown(call, spec, self._policy, each) for (call, spec), each in zip(owed, outputs, strict=True)]
        told = tuple([ToolOutput(result.content, result.ok) for result in results])
        link = self._client.link()
        if self._is_each or any(is_strong(spec) for _, spec in owed):  # P25
            await link.ask(lambda seq: Settle(seq, self._number, key, told), self._opened, self._deadline_s)
        else:
            link.tell(Settle(0, self._number, key, told), self._opened)
        return results

    async def close(self) -> Audited:
        """See `ToolSession.close`."""
        if self._audited is None:
            if self._has_begun:
                link = self._client.link()
                within_s = 2 * self._deadline_s  # it waits for what is being performed
                answer = await link.ask(lambda seq: Close(seq, self._number), self._opened, within_s)
                assert isinstance(answer, Closed)
                self._audited = answer.audited
            else:
                self._audited = Audited(policy=self._policy.digest)
        return self._audited

    def _within_s(self, calls: Sequence[ToolCall]) -> float:
        """The deadline of a decision: longer where a person is asked, or the gateway performs the call."""
        within_s, own = self._deadline_s, self._tools.by_name
        specs = [own.get(call.name) for call in calls]
        if None in specs:
            within_s += self._deadline_s
        if self._policy.approvals != "deny":
            within_s += self._policy.approval_s * sum([spec is None or needs_approval(spec) for spec in specs])
        return within_s


def _sendable(call: ToolCall) -> ToolCall:
    """`call`, or what stands for it where its arguments are none, or cannot be sent: the gateway denies that."""
    try:
        encode(call)
        is_one = isinstance(call.arguments, dict)
    except (OverflowError, UnicodeEncodeError):
        is_one = False
    if not is_one:
        name = call.name.encode("utf-8", "replace").decode()
        return ToolCall(name, {UNSENDABLE: True}, call.call_id.encode("utf-8", "replace").decode())
    return call

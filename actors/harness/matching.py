"""Which recorded turn a request goes on from. Pure: no tokens are made here, nothing is sampled.

A harness says its whole conversation with every request. What it says the assistant said is compared with what it was
told, message by message in a canonical form; the longest recorded conversation that the request extends is its parent.
A request without a parent, or one whose parent cannot be extended by it, is a context of its own::

    extends a turn that nothing else extends      the same agent and segment goes on
    extends a turn that was extended already      a branch: an agent of its own (case T18)
    shares the opening of an agent, but no turn   the history was edited: a new segment of that agent (case T3)
    asks what was asked before, to have another   an agent of its own
    shares nothing                                an agent of its own

An agent has one request at a time, so that its engine session has: whatever comes meanwhile is an agent of its own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.status import Role

_encode = msgspec.json.Encoder(order="deterministic").encode


@dataclass(kw_only=True, slots=True)
class Node:
    """A sampled turn, with everything that led to it.

    `chain` is the digest of the conversation through the turn as it was told, `ids` the context through its last
    token as bytes of i32, and `shown` the indices of the recorded turns that it is made of. `calls` are the ids of its
    calls as the renderer read them. `followers` counts the requests that extend it.
    """

    chain: str
    ids: bytes
    shown: tuple[int, ...]
    agent: str
    segment: int
    ended: bool
    calls: tuple[str, ...] = ()
    followers: int = 0


@dataclass(kw_only=True, slots=True)
class Agent:
    """One line of conversation. `opening` is the digest of its first messages, `segment` its newest."""

    name: str
    opening: str
    segment: int = 0
    running: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a request belongs. `new` are the messages beyond the parent's conversation, all of them without one."""

    agent: Agent
    parent: Node | None
    new: tuple[Message, ...]


def chains(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """Digests of the conversation's beginnings: item k is that of the first k messages, under these tools.

    White space around what an assistant said, its thoughts and the ids of its calls make no difference: harnesses trim,
    drop and rename them, and the recorded tokens are the truth anyway.
    """
    state = hashlib.blake2b(_encode(list(tools)), digest_size=16)
    digests = [state.hexdigest()]
    for message in messages:
        is_policy = message.role is Role.ASSISTANT
        content = message.content.strip() if is_policy else message.content
        calls = [[call.name, call.arguments] for call in message.tool_calls]
        state.update(_encode([message.role, content, calls]))
        digests.append(state.hexdigest())
    return digests


def opening_length(messages: Sequence[Message]) -> int:
    """How many messages an agent is known by: through the first that is not the system's."""
    return next((index + 1 for index, each in enumerate(messages) if each.role is not Role.SYSTEM), len(messages))


@dataclass(slots=True)
class Conversation:
    """The tree of what was said in one episode."""

    agents: list[Agent] = field(default_factory=list)
    _by_chain: dict[str, list[Node]] = field(default_factory=dict)
    _raw: list[Node] = field(default_factory=list)

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, again: bool) -> Place:
        """Where a conversation goes on; `again` says that the very same was asked before."""
        digests = chains(messages, tools)
        opening = digests[opening_length(messages)]
        for length in range(len(messages) - 1, 0, -1):
            nodes = self._by_chain.get(digests[length])
            if nodes and not any(each.role is Role.ASSISTANT for each in messages[length:]):
                parent = min(reversed(nodes), key=lambda node: node.followers)
                return Place(
                    agent=self._going_on(parent, opening),
                    parent=parent,
                    new=_with_read_ids(messages[length - 1], messages[length:], parent),
                )
        known = next((each for each in self.agents if each.opening == opening), None)
        agent = known if known is not None and not known.running and not again else self._another(opening)
        return Place(agent=agent, parent=None, new=tuple(messages))

    def place_ids(self, ids: bytes, *, again: bool) -> Place:
        """Where token ids, as bytes of i32, go on: after the longest recorded context that they begin with."""
        fitting = [node for node in self._raw if len(node.ids) < len(ids) and ids.startswith(node.ids)]
        if fitting:
            parent = max(fitting, key=lambda node: (len(node.ids), -node.followers))
            return Place(agent=self._going_on(parent, ""), parent=parent, new=())
        known = next((each for each in self.agents if each.opening == ""), None)
        agent = known if known is not None and not known.running and not again else self._another("")
        return Place(agent=agent, parent=None, new=())

    def join(self, agent: Agent) -> None:
        """An agent's request begins; a place that nothing is sampled for makes no agent."""
        if all(agent is not each for each in self.agents):
            self.agents.append(agent)

    def add(self, node: Node, *, raw: bool) -> None:
        """A turn was sampled; `raw` where it was asked for by ids."""
        if raw:
            self._raw.append(node)
        else:
            self._by_chain.setdefault(node.chain, []).append(node)

    def _going_on(self, parent: Node, opening: str) -> Agent:
        agent = next(each for each in self.agents if each.name == parent.agent)
        is_taken = agent.running or parent.followers or parent.segment != agent.segment
        return self._another(opening) if is_taken else agent

    def _another(self, opening: str) -> Agent:
        return Agent(name=str(len(self.agents)) if self.agents else "", opening=opening)


def _with_read_ids(said: Message, new: Sequence[Message], parent: Node) -> tuple[Message, ...]:
    """`new` with the ids of calls as the renderer read them, in place of those that the client knows."""
    names = {call.call_id: read for call, read in zip(said.tool_calls, parent.calls, strict=False) if call.call_id}
    return tuple(
        msgspec.structs.replace(each, tool_call_id=names[each.tool_call_id]) if each.tool_call_id in names else each
        for each in new
    )

"""Messages: what is said to a model and by it, before it becomes tokens."""

from typing import Any

import msgspec

from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability, RewardKind, Role, SideEffectTier, Status


class ContentPart(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Text, or a reference to a blob that is kept elsewhere.

    For a blob, `blob_hash` and `mime_type` are set and `placeholder` is the half-open token span that stands for it.
    """

    text: str = ""
    blob_hash: str = ""
    mime_type: str = ""
    placeholder: tuple[int, int] | None = None


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A call as the model wrote it. `arguments` is the decoded JSON object."""

    name: str
    arguments: dict[str, Any] = {}
    call_id: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation. A tool's result names the call that it answers in `tool_call_id`."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    parts: tuple[ContentPart, ...] = ()


class ToolSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tool that is on offer: its JSON Schema, capability and side-effect tier.

    `reads` says what arguments mean, by name: "path", "command", "code", "url" or "text"; rules look at them so.
    `trusted` is the author's word that its output is his own text, so that nothing derived from it is tainted. `price`
    is what one call costs, in the recipe's currency. Of these three a model is told nothing.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    capability: Capability = Capability.READ
    tier: SideEffectTier = SideEffectTier.READ
    reads: dict[str, str] = {}
    trusted: bool = False
    price: float = 0.0


class HashPair(msgspec.Struct, frozen=True, gc=False):
    """Hashes of one thing: as it is, and after a versioned normaliser took times, pids and temporary paths out."""

    raw: str = ""
    canonical: str = ""


class Cost(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What something used. Seconds are durations on one host; `money` is in the recipe's currency."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    tool_s: float = 0.0
    money: float = 0.0


class RewardComponent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One component as an environment or scorer states it. `valid=False` means there is no value, not zero."""

    kind: RewardKind
    value: float = 0.0
    valid: bool = True
    evidence: str = ""


class Observation(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What `reset` returns: the opening messages and the hash of the state behind them."""

    messages: tuple[Message, ...]
    state_hash: HashPair = HashPair()
    metadata: dict[str, Any] = {}


class CallOutcome(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the gateway says of one call of a step.

    `decision` is "allow" or "deny", `rule` which decision denied it and by what ("capability:network"). `taint` names
    the sources that its arguments derive from, `source` where its result is from. Times are seconds since the step
    began.
    """

    decision: str = "allow"
    rule: str = ""
    tier: SideEffectTier = SideEffectTier.READ
    source: str = ""
    taint: tuple[str, ...] = ()
    in_doubt: bool = False
    result_hash: str = ""
    start_s: float = 0.0
    end_s: float = 0.0


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What `step` returns.

    `terminated` (the task ended) and `truncated` (a limit ended it) are never both set. `messages` are the
    observations in the order in which the template renders them; `metadata` is JSON-safe and survives every hop.
    `calls` and `taint`, the untrusted sources of `messages`, are the gateway's to fill in.
    """

    messages: tuple[Message, ...] = ()
    rewards: tuple[RewardComponent, ...] = ()
    terminated: bool = False
    truncated: bool = False
    status: Status = Status.OK
    cost: Cost = Cost()
    state_hash: HashPair = HashPair()
    metadata: dict[str, Any] = {}
    calls: tuple[CallOutcome, ...] = ()
    taint: str = ""


class Task(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One task. `data` is JSON-safe and is all that an environment needs besides the seed.

    `grants` are what its calls may do, instead of the recipe's own and within what the recipe lets tasks grant.
    """

    task_id: str
    environment: str
    data: dict[str, Any] = {}
    version: str = "1"
    split: str = "train"
    seed: int = 0
    grants: tuple[Grant, ...] = ()

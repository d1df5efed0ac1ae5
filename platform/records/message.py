"""Messages: what is said to a model and by it, before it becomes tokens."""

from typing import Any

import msgspec

from headrace.platform.records.status import RewardKind, Role, SideEffectTier, Status


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
    """A tool that an environment offers: its JSON Schema, capability and side-effect tier."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    capability: str = "read"
    tier: SideEffectTier = SideEffectTier.READ


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


class StepResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What `step` returns.

    `terminated` (the task ended) and `truncated` (a limit ended it) are never both set. `messages` are the
    observations in the order in which the template renders them; `metadata` is JSON-safe and survives every hop.
    """

    messages: tuple[Message, ...] = ()
    rewards: tuple[RewardComponent, ...] = ()
    terminated: bool = False
    truncated: bool = False
    status: Status = Status.OK
    cost: Cost = Cost()
    state_hash: HashPair = HashPair()
    metadata: dict[str, Any] = {}


class Task(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One task. `data` is JSON-safe and is all that an environment needs besides the seed."""

    task_id: str
    environment: str
    data: dict[str, Any] = {}
    version: str = "1"
    split: str = "train"
    seed: int = 0

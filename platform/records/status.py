"""The closed vocabularies of the records: why something ended, whose fault it was, and what became of it.

Each is a `StrEnum` that answers the questions callers ask, so that no one compares lists of codes by hand.
"""

from enum import StrEnum


class Purpose(StrEnum):
    """What an episode was played for. Only `TRAIN` enters the ledger's equation (P3)."""

    TRAIN = "train"
    EVAL = "eval"
    SFT = "sft"
    REPLAY = "replay"


class FaultOwner(StrEnum):
    """Who is to blame when an episode did not end OK."""

    NONE = "none"
    MODEL = "model"
    ENVIRONMENT = "environment"
    INFRASTRUCTURE = "infrastructure"
    SAFETY = "safety"


class Status(StrEnum):
    """How a step or an episode went (docs/design.md section 6.3)."""

    OK = "OK"
    MODEL_INVALID_ACTION = "MODEL_INVALID_ACTION"
    MODEL_BAD_PLAN = "MODEL_BAD_PLAN"
    ENV_TRANSIENT = "ENV_TRANSIENT"
    ENV_BUG = "ENV_BUG"
    SAFETY_BLOCK = "SAFETY_BLOCK"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"

    @property
    def is_error(self) -> bool:
        """The episode says nothing about the policy: its reward is not a number anywhere."""
        return self in (Status.ENV_TRANSIENT, Status.ENV_BUG)

    @property
    def is_retryable(self) -> bool:
        """A fresh attempt of the same slot may succeed."""
        return self is Status.ENV_TRANSIENT

    @property
    def is_truncated(self) -> bool:
        """A budget ended the episode; the state that it reached is still graded (P27)."""
        return self is Status.BUDGET_EXHAUSTED


class StopReason(StrEnum):
    """Which event ended an episode."""

    TERMINATED = "terminated"
    ENV_TRUNCATED = "env_truncated"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_SECONDS = "max_seconds"
    FAULT = "fault"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why the engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Role(StrEnum):
    """Who speaks in a turn."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ActionKind(StrEnum):
    """What an assistant turn does; empty for turns that are not the policy's."""

    NONE = ""
    TEXT = "text"
    TOOL = "tool"
    ASK_USER = "ask_user"
    SUBMIT = "submit"
    GIVE_UP = "give_up"


class SideEffectTier(StrEnum):
    """How far a tool call reaches: reads run, writes spend a budget, irreversible ones need approval."""

    READ = "read"
    WRITE = "write"
    IRREVERSIBLE = "irreversible"


class Capability(StrEnum):
    """What a tool can reach; a call needs a grant of it (docs/gateway.md)."""

    READ = "read"
    WRITE = "write"
    NETWORK = "network"
    SECRET = "secret"
    IRREVERSIBLE = "irreversible"


class RewardKind(StrEnum):
    """The components of a reward (outcome, format, cost and process, as in agentic-RL practice, and safety); and the
    potential of the state that a step led to, which is no reward: `returns.shaping` makes rewards of it."""

    OUTCOME = "outcome"
    FORMAT = "format"
    COST = "cost"
    PROCESS = "process"
    SAFETY = "safety"
    POTENTIAL = "potential"

    @property
    def is_reward(self) -> bool:
        """Whether it counts for the score."""
        return self is not RewardKind.POTENTIAL


class UpdateMode(StrEnum):
    """When an episode may meet new weights (docs/design.md section 6.2)."""

    STICKY = "sticky"
    TURN = "turn"
    INFLIGHT = "inflight"


class Fate(StrEnum):
    """What became of an attempt (P3). Each dispatched attempt gets exactly one that is not `IN_FLIGHT`."""

    IN_FLIGHT = "in_flight"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class DropReason(StrEnum):
    """Why an attempt that was played was not trained."""

    LAG = "lag"
    AGE = "age"
    ENVIRONMENT = "environment"
    ZERO_VARIANCE = "zero_variance"
    TOO_FEW = "too_few"
    FIDELITY = "fidelity"
    NAN = "nan"
    POISON = "poison"
    SPARE = "spare"
    STOPPED = "stopped"


class CancelReason(StrEnum):
    """Why an attempt was stopped before it ended."""

    STOPPED = "stopped"
    ROLLED_BACK = "rolled_back"
    LAG = "lag"
    SUPERSEDED = "superseded"

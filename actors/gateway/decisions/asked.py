"""What every decision gets, and what it answers when the answer is no."""

from dataclasses import dataclass, field

import msgspec

from headrace.actors.gateway.decisions.runs import Runs
from headrace.actors.gateway.policy import Policy
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant


class Denial(msgspec.Struct, frozen=True):
    """Why a call does not happen.

    `rule` is DECISION:WHAT, such as "capability:network", from a small fixed set: metrics count by it. `told` is for
    the model: it helps, and repeats nothing secret. `invalid` marks a mistake of the model, which is no violation.
    """

    rule: str
    told: str
    invalid: bool = False


@dataclass(slots=True)
class Asked:
    """One call in front of the gateway. `grant` is set by the capability decision, `taint` by the taint decision."""

    call: ToolCall
    spec: ToolSpec
    key: str
    here: bool
    """The gateway performs it itself."""
    grant: Grant | None = None
    taint: tuple[str, ...] = ()
    named: "tuple[tuple[str, str], ...] | None" = None
    """What `reading.texts` has found in it."""


@dataclass(slots=True)
class EpisodeState:
    """What the gateway remembers of one episode (one branch of it, P26) between its calls. Times are monotonic."""

    scope: str
    """EPISODE/BRANCH, and what tells sessions of the same branch apart."""
    policy: Policy
    specs: dict[str, ToolSpec]
    """By the name that the model uses: the environment's tools and those that are performed here."""
    mounted: frozenset[str]
    """The names of those that are performed here."""
    grants: tuple[Grant, ...]
    began_s: float
    trusted: tuple[str, ...] = ()
    """Texts of the task: what is copied from them is not tainted."""
    credential: str = ""
    """Names the episode to the proxy, as long as it lasts; never shown to anybody else."""
    uses: dict[int, int] = field(default_factory=dict)
    """Of grants that are limited, by their position in `grants`."""
    calls: int = 0
    calls_of: dict[str, int] = field(default_factory=dict)
    writes: int = 0
    money: float = 0.0
    violations: int = 0
    blocked: dict[str, int] = field(default_factory=dict)
    exfiltration: int = 0
    duplicates: int = 0
    next_call_s: float = 0.0
    """When the rate allows the next call."""
    seen: list[tuple[str, str]] = field(default_factory=list)
    """Untrusted text that was shown, with its source, as the taint decision keeps it."""
    runs: Runs | None = None
    """Of `seen`, once a call was compared with it."""

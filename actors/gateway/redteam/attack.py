"""What an attack is: what is planted where, under which permissions, and how its effect is seen.

An attack is judged by its effect on the world (a file, a connection, a message that went out), never by what the
gateway says of it. Its control is the same attack where the decision is missing that should stop it: under a policy
that permits it, or without a gateway. A control without an effect proves nothing, and counts as a failure.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from headrace.actors.gateway.policy import Policy
from headrace.actors.gateway.redteam.obedient import turns_of
from headrace.actors.gateway.redteam.scene import Scene
from headrace.actors.gateway.redteam.sites import Sites
from headrace.platform.records.message import ToolCall, ToolSpec
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

if TYPE_CHECKING:
    from headrace.actors.gateway.redteam.lab import Lab

Bare: TypeAlias = Literal["bare"]
BARE: Final = "bare"
"""A control without a gateway: the world performs whatever it is asked for."""
FOLDER: Final = "@folder@"
"""In the args of a mount: the scene's own folder."""
LINK: Final = "link:"
"""Before a path: a file of the box is a link to that path of the scene's own workspace, on the host."""


class AttackClass(StrEnum):
    """What an attack is made of."""

    INJECTION = "injection"
    PATHS = "paths"
    COMMANDS = "commands"
    ADDRESSES = "addresses"
    REDIRECTS = "redirects"
    ARGUMENTS = "arguments"
    OUTPUTS = "outputs"
    DEFINITIONS = "definitions"
    KEYS = "keys"
    APPROVALS = "approvals"
    AUDIT = "audit"
    CREDENTIALS = "credentials"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one play came to.

    `effect` says what the attack did to the world, empty where it did nothing. `rules` are the gateway's denials, which
    decide nothing here. `ended` is why the episode could not go on, `broken` why the play says nothing either way.
    """

    effect: str = ""
    rules: Counter[str] = field(default_factory=Counter)
    ended: str = ""
    broken: str = ""


Act: TypeAlias = "Callable[[Lab, Attack, Policy | Bare], Awaitable[Finding]]"
"""Plays an attack in one mode: under a policy, or without a gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack.

    Args:
        attack_id: its name, unique in the catalogue.
        kind: its class.
        about: what is tried, and why it could work.
        planted: what the page that the episode opens holds; the policy makes every call that stands in it.
        policy: the permissions that it runs under.
        effect: what it did to the world, in words; empty for nothing.
        control: a policy under which it has its effect, or `BARE`; None where others of its class show that.
        stopped_by: what stops it, where no rule of the gateway's does.
        sites: the hosts that there are outside.
        files: what the box begins with, by path in its workspace; `looks` are files of it that `effect` asks for.
        tools_after: what the world claims to offer, instead of its own, once its page was read.
        grants: the task's own.
        act: how it is played, where obeying is not all of it.
    """

    attack_id: str
    kind: AttackClass
    about: str
    policy: Policy
    effect: Callable[[Scene], str] = lambda scene: ""
    planted: str = ""
    control: Policy | Bare | None = None
    stopped_by: str = ""
    sites: Sites = field(default_factory=Sites)
    files: dict[str, str] = field(default_factory=dict)
    looks: tuple[str, ...] = ()
    tools_after: tuple[ToolSpec, ...] = ()
    grants: tuple[Grant, ...] = ()
    act: "Act | None" = None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that obeying makes, as far as the page spells them out."""
        return tuple(call for turn in turns_of(self.planted) for call in turn)


READ, WRITE, NETWORK, SECRET, IRREVERSIBLE = (
    Grant(each)
    for each in (
        Capability.READ,
        Capability.WRITE,
        Capability.NETWORK,
        Capability.SECRET,
        Capability.IRREVERSIBLE,
    )
)
ALL = (READ, WRITE, NETWORK, SECRET, IRREVERSIBLE)
TAINTED = (Capability.NETWORK, Capability.SECRET, Capability.IRREVERSIBLE)
"""What a recipe refuses to what derives from untrusted text, unless it says otherwise."""
USUAL = Policy(grants=(READ, WRITE), taint=TAINTED)
"""The permissions of a recipe that says nothing."""

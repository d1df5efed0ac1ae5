"""What a gateway decides by, as data: the permissions of one environment of a recipe, and the tools mounted there."""

from functools import cached_property

import msgspec

from headrace.platform.hashing import digest_value
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability


class Rule(msgspec.Struct, frozen=True, omit_defaults=True):
    """See `RuleConfig`."""

    name: str
    tools: tuple[str, ...] = ()
    argument: str = ""
    matches: str = ""
    because: str = ""


class CallBudgets(msgspec.Struct, frozen=True, omit_defaults=True):
    """See `CallBudgetsConfig`; 0 is no limit."""

    calls: int = 0
    calls_of: dict[str, int] = {}
    writes: int = 64
    calls_per_s: float = 0.0
    money: float = 0.0


class Mount(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool beside the environment's own. See `ToolConfig`; secrets in `args` are still references."""

    kind: str
    name: str = ""
    capability: Capability | None = None
    args: dict[str, object] = {}


class Policy(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """See `PermissionsConfig`; `ceiling` is what a task's own grants may say. Equal policies have equal digests."""

    grants: tuple[Grant, ...] = ()
    ceiling: tuple[Grant, ...] = ()
    rules: tuple[Rule, ...] = ()
    commands_allow: tuple[str, ...] = ()
    commands_deny: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    taint: tuple[Capability, ...] = ()
    taint_mode: str = "derived"
    approvals: str = "deny"
    approval_s: float = 20.0
    budgets: CallBudgets = CallBudgets()
    output_kb: int = 64
    on_block: str = "observe"
    max_violations: int = 0
    mounts: tuple[Mount, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Hash of all of it, as it is after it was sent; episodes keep it as `digests.gateway_policy`."""
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=Policy)
        return digest_value(msgspec.to_builtins(sent))

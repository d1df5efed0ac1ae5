"""What the calls of an episode may do, which tools are mounted beside an environment's own, and how it is audited."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.platform.config.base import StrictModel
from headrace.platform.config.permission_values import (
    check_approver,
    check_domain,
    check_expression,
    check_folder,
    check_network,
    check_path_pattern,
    every,
)
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

ToolKind = Literal["shell", "files", "python", "http", "search", "mcp"]
BOXED_TOOLS: tuple[ToolKind, ...] = ("shell", "files", "python")
"""Those that run in a sandbox; the gateway itself performs the others."""
ArgumentKind = Literal["path", "command", "code", "url", "text"]


class GatewayConfig(StrictModel):
    """The gateway processes of a run, one for each node."""

    audit: Literal["group", "each"] = "group"
    """When an audit entry is on disk: `each` before any result is given out; `group` does that for calls that write,
    are irreversible, or reach network or secrets, and lets reads follow within `flush_s`."""
    flush_s: float = Field(0.2, gt=0)
    """How long the entry of a read may wait for others to be written with it."""
    deadline_s: float = Field(10.0, gt=0)
    """How long a decision may take, approvals aside; beyond it the call does not happen."""


class GrantConfig(StrictModel):
    """Leave to use one capability; `grants: [read]` is short for `grants: [{capability: read}]`."""

    capability: Capability
    tools: tuple[str, ...] = ()
    """Patterns of tool names; empty: all."""
    paths: tuple[str, ...] = ()
    """Patterns of paths, as seen from the workspace; empty: all."""
    domains: tuple[str, ...] = ()
    """Patterns of host names; empty: all that `domains` of the permissions allow."""
    expires_s: float = Field(0.0, ge=0)
    """Seconds after the episode's first call; 0: with the episode."""
    uses: int = Field(0, ge=0)
    """How many calls; 0: any number."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"capability": value} if isinstance(value, str) else value

    _paths_stay_inside = field_validator("paths")(every(check_path_pattern))
    _domains_are_names = field_validator("domains")(every(check_domain))

    def grant(self) -> Grant:
        """The record form."""
        return Grant(self.capability, self.tools, self.paths, self.domains, self.expires_s, self.uses)


class RuleConfig(StrictModel):
    """One pattern that a call must not fit."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """What records and metrics call it."""
    tools: tuple[str, ...] = ()
    """Patterns of tool names; empty: all."""
    argument: str = ""
    """The argument that is looked at; empty: each, at any depth."""
    matches: str = ""
    """A regular expression (searched for); empty: any value."""
    because: str = ""
    """What the model is told."""

    @field_validator("matches")
    @classmethod
    def _matches_compiles(cls, value: str) -> str:
        check_expression(value)
        return value


class CommandsConfig(StrictModel):
    """Which programs a command line may start, wherever an argument is read as a command."""

    allow: tuple[str, ...] = ()
    """Names of programs; empty: all."""
    deny: tuple[str, ...] = ()


class CallBudgetsConfig(StrictModel):
    """Limits of one episode; 0: none."""

    calls: int = Field(0, ge=0)
    calls_of: dict[str, int] = Field(default_factory=dict)
    """By tool."""
    writes: int = Field(64, ge=0)
    """Calls that have side effects."""
    calls_per_s: float = Field(0.0, ge=0)
    """A call over it waits."""
    money: float = Field(0.0, ge=0)
    """Sum of the prices of tools."""

    @field_validator("calls_of")
    @classmethod
    def _counts_are_counts(cls, value: dict[str, int]) -> dict[str, int]:
        for tool, most in value.items():
            if most < 0:
                raise ValueError(f"{tool} has {most}; give at least 1, or 0 for no limit")
        return value


class PermissionsConfig(StrictModel):
    """What the calls of an environment's episodes may do. Deny by default: what is not granted does not happen."""

    grants: tuple[GrantConfig, ...] = (
        GrantConfig(capability=Capability.READ),
        GrantConfig(capability=Capability.WRITE),
    )
    """What tasks may do that say nothing of it themselves."""
    tasks_may_grant: tuple[GrantConfig, ...] = ()
    """What a task's own grants may say; empty: nothing beyond `grants`."""
    rules: tuple[RuleConfig, ...] = ()
    commands: CommandsConfig = CommandsConfig()
    paths: tuple[str, ...] = ()
    """Folders under which paths may lie, as seen from the workspace; empty: the workspace and /tmp."""
    domains: tuple[str, ...] = ()
    """Host names that URLs may have, `*.example.org` for all under it; empty: none."""
    addresses: tuple[str, ...] = ()
    """Networks that may be reached although they are not public, such as `127.0.0.1/32`; empty: none."""
    taint: tuple[Capability, ...] = (Capability.NETWORK, Capability.SECRET, Capability.IRREVERSIBLE)
    """Capabilities that arguments derived from untrusted text may not be used with."""
    taint_mode: Literal["derived", "seen"] = "derived"
    """`derived`: where an argument holds untrusted text. `seen`: as soon as any untrusted text was shown."""
    approvals: str = "deny"
    """Who approves what is irreversible: `deny`, `queue` (see `headrace approvals`), or your function as
    `./file.py:name` or `package.module:name`."""
    approval_s: float = Field(20.0, gt=0)
    """How long an approval may take; then it is a denial. Less than `step_deadline_s`, where anybody is asked."""
    budgets: CallBudgetsConfig = CallBudgetsConfig()
    output_kb: int = Field(64, ge=1)
    """KiB of one result that the model is shown; the middle of more is left out."""
    on_block: Literal["observe", "end"] = "observe"
    """After a denied call: tell the model and go on, or end the episode as SAFETY_BLOCK."""
    max_violations: int = Field(0, ge=0)
    """Denied calls after which the episode ends as SAFETY_BLOCK; 0: any number."""

    _paths_are_folders = field_validator("paths")(every(check_folder))
    _domains_are_names = field_validator("domains")(every(check_domain))
    _addresses_are_networks = field_validator("addresses")(every(check_network))

    @field_validator("approvals")
    @classmethod
    def _approvals_name_somebody(cls, value: str) -> str:
        check_approver(value)
        return value


class ToolConfig(StrictModel):
    """A tool mounted beside the environment's own; `tools: [shell]` is short for `tools: [{kind: shell}]`."""

    kind: ToolKind
    """`shell`, `files` and `python` run in the sandbox; `http`, `search` and `mcp` in the gateway."""
    name: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")
    """Of one tool what the model calls it, of several (`files`, `mcp`) the prefix; empty: the kind, or no prefix."""
    capability: Capability | None = None
    """Instead of the kind's own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """`search`: corpus. `mcp`: command, env, trusted. `http`: methods, headers by domain (secrets as `${env:NAME}`)."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

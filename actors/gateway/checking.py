"""What is wrong with the mounts and permissions of an environment, found before anything is played.

`check_policy` depends on the recipe and the environment's own tools, `check_host` on the host that will play: folders,
programs, secrets, functions. Neither starts a process, reads all of a corpus or opens a connection, so that what shows
only then is left to the gateway. Values that are wrong by themselves are refused by the configuration.
"""

import importlib
import inspect
import os
import shutil
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.actors.environments.answers import checked_tools
from headrace.actors.gateway.boxed import KINDS as BOXED_KINDS
from headrace.actors.gateway.boxed import boxed_tools, mounted_spec
from headrace.actors.gateway.decisions.patterns import fits
from headrace.actors.gateway.perform.performer import read_args
from headrace.actors.gateway.policy import Mount, Policy, Rule
from headrace.actors.targets import load_target
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.contracts import Environment
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

if TYPE_CHECKING:
    from headrace.actors.gateway.perform.mcp_tool import McpArgs


def check_policy(policy: Policy, environment: Environment | None, known_as: str) -> None:
    """Refuse what cannot be meant.

    Args:
        policy: of the environment.
        environment: a session before its reset; None where it is played elsewhere.
        known_as: what the recipe calls it, for messages.

    Raises:
        ConfigError: a mount has wrong args, two tools have one name, or a rule or a budget is for a tool that there is
            not, as far as tools are known.
    """
    try:
        mounted = _mounted(policy.mounts)
        own = _own_tools(environment) if environment is not None and _names_tools(policy) else None
        _check_names(own or (), mounted)
        if own is not None and None not in mounted:
            _check_named(policy, [*own, *(spec for spec in mounted if spec is not None)])
    except ConfigError as error:
        raise ConfigError(f"environments.{known_as}.{error}") from None


def check_host(policy: Policy, known_as: str, env: Mapping[str, str] = os.environ) -> None:
    """Refuse what this host has not. Loads the function that approves.

    Args:
        policy: of the environment.
        known_as: what the recipe calls it, for messages.
        env: where `${env:NAME}` is read.

    Raises:
        ConfigError: a folder, a document, a program, a secret or the function that approves is not here.
    """
    try:
        for mount in policy.mounts:
            if (check := _HOST_CHECKS.get(mount.kind)) is not None:
                check(mount, env)
        if policy.approvals not in ("deny", "queue"):
            _check_approver(policy.approvals)
    except ConfigError as error:
        raise ConfigError(f"environments.{known_as}.{error}") from None


# --- which tools there are ------------------------------------------------------------------------------------------


def _mounted(mounts: Sequence[Mount]) -> list[ToolSpec | None]:
    """The tools of all mounts; None stands for those that only a server can tell. Raises ConfigError."""
    found: list[ToolSpec | None] = list(boxed_tools(mounts).specs.values())
    for mount in mounts:
        if mount.kind == "http":
            from headrace.actors.gateway.perform.http_tool import http_specs, read_http_args

            found += http_specs(mount, read_http_args(mount)).values()
        elif mount.kind == "search":
            from headrace.actors.gateway.perform.search_tool import SearchArgs, search_specs

            found += search_specs(mount, read_args(mount, SearchArgs))
        elif mount.kind not in BOXED_KINDS:
            only = _mcp_args(mount).only
            found += [mounted_spec(ToolSpec(name), mount, alone=False) for name in only] or [None]
    return found


def _mcp_args(mount: Mount) -> "McpArgs":
    try:
        importlib.import_module("mcp")
    except ModuleNotFoundError as error:
        raise ConfigError(f"tools: mcp: {error.name} is not installed; run: pip install 'headrace[mcp]'") from None
    from headrace.actors.gateway.perform.mcp_tool import McpArgs

    return read_args(mount, McpArgs)


def _names_tools(policy: Policy) -> bool:
    """Whether it matters which tools the environment has: somebody else's code is not asked without need."""
    return bool(policy.mounts or policy.rules or policy.budgets.calls_of)


def _own_tools(environment: Environment) -> Sequence[ToolSpec] | None:
    """Those of a session before its reset; None where it does not know them yet."""
    method = environment.tools
    if inspect.iscoroutinefunction(method):
        return None
    try:
        tools = checked_tools(method(), method)
    except (Exception, SystemExit):  # foreign code, which may need its reset first, or fail there: its episodes say so
        return None
    is_own = type(environment).__module__.startswith("headrace.")
    return tools if tools or is_own else None


def _check_names(own: Sequence[ToolSpec], mounted: Sequence[ToolSpec | None]) -> None:
    seen = {spec.name: "the environment's own tool has the name" for spec in own}
    for spec in mounted:
        if spec is None:
            continue
        if (told := seen.get(spec.name)) is not None:
            raise ConfigError(f"tools: {told} {spec.name!r}; give the mount a `name`")
        seen[spec.name] = "two are called"


# --- what is said of tools ------------------------------------------------------------------------------------------


def _check_named(policy: Policy, tools: Sequence[ToolSpec]) -> None:
    """Refuse rules and budgets that would never count, as they look like boundaries."""
    names = [spec.name for spec in tools]
    for name in policy.budgets.calls_of:
        if name not in names:
            raise ConfigError(f"permissions.budgets.calls_of: there is no tool {name!r}; {_known(name, names)}")
    for rule in policy.rules:
        for pattern in rule.tools:
            if not any(fits(name, (pattern,)) for name in names):
                told = f"no tool fits {pattern!r}; {_known(pattern, names)}"
                raise ConfigError(f"permissions.rules: {rule.name}: tools: {told}")
        _check_argument(rule, [spec for spec in tools if not rule.tools or fits(spec.name, rule.tools)])


def _check_argument(rule: Rule, tools: Sequence[ToolSpec]) -> None:
    """Refuse an argument that none of the rule's tools declares; a tool that takes any argument may have it."""
    known: dict[str, None] = {}
    for spec in tools:
        declared = spec.parameters.get("properties")
        if not isinstance(declared, dict) or spec.parameters.get("additionalProperties") not in (None, False):
            return
        known |= dict.fromkeys(declared)
    if rule.argument and rule.argument not in known:
        told = f"no tool that it is for has {rule.argument!r}; {_known(rule.argument, list(known))}"
        raise ConfigError(f"permissions.rules: {rule.name}: argument: {told}")


def _known(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(sorted(names))}" if names else "there are none"


# --- what the host has ----------------------------------------------------------------------------------------------


def _check_search(mount: Mount, env: Mapping[str, str]) -> None:
    from headrace.actors.gateway.perform.corpus import check_corpus
    from headrace.actors.gateway.perform.search_tool import SearchArgs

    corpus = Path(read_args(mount, SearchArgs).corpus)
    if not corpus.is_dir():
        raise ConfigError(f"tools: search: args.corpus: {corpus} is no folder on this host")
    if not os.access(corpus, os.R_OK | os.X_OK):
        raise ConfigError(f"tools: search: args.corpus: {corpus} cannot be read")
    try:
        check_corpus(corpus)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tools: search: args.corpus: {error}") from None


def _check_http(mount: Mount, env: Mapping[str, str]) -> None:
    from headrace.actors.gateway.perform.http_headers import HostHeaders
    from headrace.actors.gateway.perform.http_tool import read_http_args

    try:
        HostHeaders(read_http_args(mount).headers, SecretValues(), env)
    except ConfigError as error:
        raise _in_mount("http: args.headers", error) from None


def _check_mcp(mount: Mount, env: Mapping[str, str]) -> None:
    args = _mcp_args(mount)
    try:
        given = {name: resolve(value, env=env) for name, value in args.env.items()}
        for value in args.args:
            resolve(value, env=env)
    except ConfigError as error:
        raise _in_mount("mcp", error) from None
    folder = Path(args.cwd or ".")
    if not folder.is_dir():
        raise ConfigError(f"tools: mcp: args.cwd: {folder} is no folder on this host")
    if "/" in args.command:
        found = os.access(program := folder / args.command, os.X_OK) and program.is_file()
    else:
        found = shutil.which(args.command, path=given.get("PATH", env.get("PATH"))) is not None
    if not found:
        told = f"there is no program {args.command!r} on this host; install it, or give its path"
        raise ConfigError(f"tools: mcp: args.command: {told}")


def _in_mount(place: str, error: ConfigError) -> ConfigError:
    """A secret that is missing says nothing of the mount that needs it."""
    told = str(error)
    return error if told.startswith("tools:") else ConfigError(f"tools: {place}: {told}")


def _check_approver(target: str) -> None:
    try:
        function, _ = load_target(target)
    except ConfigError as error:
        raise ConfigError(f"permissions.approvals: {error}") from error
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"permissions.approvals: {target} must be a plain function")


_HOST_CHECKS = {"search": _check_search, "http": _check_http, "mcp": _check_mcp}

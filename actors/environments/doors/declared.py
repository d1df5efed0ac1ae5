"""What the author of a tool declares of it, for the gateway: what it can reach, and how to read its arguments.

::

    @headrace.tool(capability="network", tier="irreversible", reads={"address": "url"}, price=0.01)
    def order(address: str, amount: int) -> str:
        ...

A function without it only reads.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from headrace.platform.config.gateway import ArgumentKind
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

Function = TypeVar("Function", bound=Callable[..., Any])
_DECLARED = "__headrace_tool__"
_KINDS = get_args(ArgumentKind)


def tool(
    *,
    capability: str = Capability.READ,
    tier: str = "",
    reads: Mapping[str, str] | None = None,
    trusted: bool = False,
    price: float = 0.0,
) -> Callable[[Function], Function]:
    """Declare what a tool can reach. The function stays as it is.

    Args:
        capability: "read", "write", "network", "secret" or "irreversible": what a recipe has to grant.
        tier: "read", "write" or "irreversible": the side effect of one call. Where it is not given, "read" for a tool
            that reads, "irreversible" for one that cannot be undone, and "write" for all others.
        reads: by argument, what it is to the gateway's rules: "path", "command", "code", "url" or "text".
        trusted: its output is the author's own text, so that nothing derived from it is tainted.
        price: of one call, in the recipe's currency.

    Raises:
        ConfigError: for a word that is none of these, and a price below 0.
    """
    reach = _word("capability", capability, Capability)
    side_effect = _word("tier", tier, SideEffectTier) if tier else _usual(reach)
    for argument, kind in (reads or {}).items():
        if kind not in _KINDS:
            raise ConfigError(f"headrace.tool: reads[{argument!r}] is one of {', '.join(_KINDS)}, not {kind!r:.80}")
    if price < 0:
        raise ConfigError(f"headrace.tool: price is 0 or more, not {price}")
    told = {"capability": reach, "tier": side_effect, "reads": dict(reads or {}), "trusted": trusted, "price": price}

    def declare(function: Function) -> Function:
        setattr(function, _DECLARED, told)
        return function

    return declare


def declared(function: Callable[..., Any], spec: ToolSpec, where: str) -> ToolSpec:
    """`spec` with what was declared of its function.

    Raises:
        ConfigError: it names an argument that the function does not have.
    """
    told = getattr(function, _DECLARED, None)
    if told is None:
        return spec
    unknown = [name for name in told["reads"] if name not in spec.parameters["properties"]]
    if unknown:
        raise ConfigError(f"{where}: reads names {', '.join(unknown)}, which is no argument of it")
    return msgspec.structs.replace(spec, **told)


def _usual(capability: Capability) -> SideEffectTier:
    if capability is Capability.READ:
        return SideEffectTier.READ
    return SideEffectTier.IRREVERSIBLE if capability is Capability.IRREVERSIBLE else SideEffectTier.WRITE


Word = TypeVar("Word", Capability, SideEffectTier)


def _word(name: str, given: str, kind: type[Word]) -> Word:
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(f"headrace.tool: {name} is one of {', '.join(kind)}, not {given!r:.80}") from None

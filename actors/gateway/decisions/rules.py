"""What a call may name: paths, commands, host names and addresses, and patterns that a recipe forbids.

Paths, commands and URLs are looked at where a tool declares that an argument is one; a program's code only by patterns.
Patterns look at texts as they are and with compatible characters made plain, and refuse a text that is too long to be
looked at.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.actors.gateway.decisions.addresses import url_problem
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.decisions.cached import PerObjects
from headrace.actors.gateway.decisions.commands import command_problem
from headrace.actors.gateway.decisions.paths import path_problem
from headrace.actors.gateway.decisions.patterns import fits
from headrace.actors.gateway.decisions.reading import leaves, texts
from headrace.actors.gateway.policy import Policy
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

MOST_CHARS = 65536


@dataclass(frozen=True, slots=True)
class _Pattern:
    rule: str
    argument: str
    pattern: re.Pattern[str] | None
    told: str


def check(asked: Asked, state: EpisodeState) -> Denial | None:
    """Decide on what the call names.

    Raises:
        ConfigError: a pattern of the policy is none.
    """
    policy = state.policy
    if asked.spec.reads:
        for kind, text in texts(asked):
            if (look := _LOOKS.get(kind)) is not None and (denial := look(text, policy)) is not None:
                return denial
    if policy.rules:
        for rule in _patterns.of(policy, asked.spec):
            if (denial := _matched(rule, asked.call.arguments)) is not None:
                return denial
    return None


def _path(text: str, policy: Policy) -> Denial | None:
    told = path_problem(text, policy.paths)
    return Denial("rules:path", told) if told else None


def _command(text: str, policy: Policy) -> Denial | None:
    told = command_problem(text, policy.commands_allow, policy.commands_deny)
    return Denial("rules:command", told) if told else None


def _url(text: str, policy: Policy) -> Denial | None:
    found = url_problem(text, policy.domains, policy.addresses)
    return Denial(f"rules:{found[0]}", found[1]) if found is not None else None


_LOOKS: dict[str, Callable[[str, Policy], Denial | None]] = {"path": _path, "command": _command, "url": _url}


def _compiled(policy: Policy, spec: ToolSpec) -> tuple[_Pattern, ...]:
    """The rules of a policy that concern a tool."""
    found = []
    for rule in policy.rules:
        if rule.tools and not fits(spec.name, rule.tools):
            continue
        try:
            pattern = re.compile(rule.matches) if rule.matches else None
        except re.error as error:
            raise ConfigError(f"permissions.rules: {rule.name}: matches is no regular expression: {error}") from None
        told = rule.because or f"the rule {rule.name} forbids it"
        found.append(_Pattern(f"rules:{rule.name}", rule.argument, pattern, told))
    return tuple(found)


_patterns = PerObjects(_compiled)


def _matched(rule: _Pattern, arguments: dict[str, Any]) -> Denial | None:
    if rule.argument and rule.argument not in arguments:
        return None
    if rule.pattern is None:
        return Denial(rule.rule, rule.told)
    value = arguments[rule.argument] if rule.argument else arguments
    for text in (value,) if isinstance(value, str) else leaves(value):
        if len(text) > MOST_CHARS:
            return Denial(rule.rule, f"a text of more than {MOST_CHARS} characters is not looked at, and may not pass")
        if rule.pattern.search(text) is not None:
            return Denial(rule.rule, rule.told)
        if not text.isascii() and rule.pattern.search(unicodedata.normalize("NFKC", text)) is not None:
            return Denial(rule.rule, rule.told)
    return None

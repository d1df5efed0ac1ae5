"""Whether a call is one: a tool that there is, with arguments that fit its JSON Schema (case X1).

A call that is none is a mistake of the model, which is told what is wrong. A schema that is none is not: then the tool
is at fault. Where a schema names properties and says nothing of others, there are no others: an argument that nobody
declared is one that no rule looks at. Nothing is fetched to read a schema, whatever it refers to.
"""

import math
from typing import Any

import jsonschema_rs

from headrace.actors.call_text import usage
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.decisions.cached import PerObjects
from headrace.actors.gateway.decisions.usage import holds_json, problem, unknown_tool
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.message import ToolSpec

MOST_CHARS = 4 * 1024 * 1024
MOST_VALUES = 100_000
DEEPEST = 64
_MOST_PROBLEMS = 3
_FEW = 32  # arguments that are plain texts, of which nothing has to be added up
_MOST_SCHEMAS = 4096
_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas")
_OPEN = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", *_IN_PLACE))
"""Keywords that say something about properties that are not listed."""
_PATTERNS = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)
_by_digest: dict[str, jsonschema_rs.Validator] = {}


def check(asked: Asked, state: EpisodeState) -> Denial | None:
    """Decide on the form of a call.

    Raises:
        ConfigError: the tool's schema is none.
    """
    call = asked.call
    spec = state.specs.get(call.name)
    if spec is None:
        return Denial("schema:unknown_tool", unknown_tool(call.name, state.specs), True)
    arguments: Any = call.arguments
    if not isinstance(arguments, dict):
        kind = "a string" if isinstance(arguments, str) else type(arguments).__name__
        return Denial("schema:arguments", f"{usage(spec)}: the arguments must be a JSON object, not {kind}", True)
    if (denial := _unfit(arguments)) is not None:
        return denial
    validator = _validators.of(spec)
    if validator is None or validator.is_valid(arguments):
        return None
    return _told(validator, arguments, spec)


def validator_of(spec: ToolSpec) -> jsonschema_rs.Validator | None:
    """What a tool's arguments are checked with, None where it declares nothing.

    Raises:
        ConfigError: its parameters are no JSON Schema, or refer to something outside of it.
    """
    if not spec.parameters:
        return None
    schema = spec.parameters
    if "properties" in schema and not _OPEN & schema.keys():
        schema = {**schema, "additionalProperties": False}
    digest = digest_value(schema)
    if (validator := _by_digest.get(digest)) is None:
        try:
            validator = jsonschema_rs.validator_for(schema, offline=True, pattern_options=_PATTERNS)
        except Exception as error:  # the library's kinds are several, and the schema may be a stranger's
            told = str(error).partition("\n")[0]
            raise ConfigError(f"the parameters of the tool {spec.name!r} are no JSON Schema: {told}") from None
        if len(_by_digest) >= _MOST_SCHEMAS:
            _by_digest.clear()
        _by_digest[digest] = validator
    return validator


_validators = PerObjects(validator_of)


def _told(validator: jsonschema_rs.Validator, arguments: dict[str, Any], spec: ToolSpec) -> Denial:
    errors = []
    for error in validator.iter_errors(arguments):
        errors.append(error)
        if len(errors) == _MOST_PROBLEMS:
            break
    rule = "schema:json_in_string" if any(map(holds_json, errors)) else "schema:arguments"
    return Denial(rule, f"{usage(spec)}: {'; '.join(problem(error, spec) for error in errors)}", True)


def _unfit(arguments: dict[str, Any]) -> Denial | None:
    """What cannot be passed on: numbers and texts that JSON has no form for, too much, too deep."""
    if len(arguments) < _FEW and all(_is_plain(name) and _is_plain(value) for name, value in arguments.items()):
        return None
    chars = values = 0
    rest: list[tuple[Any, int]] = [(arguments, 1)]
    while rest:
        value, depth = rest.pop()
        values += 1
        if isinstance(value, str):
            chars += len(value)
            if not value.isascii() and _is_broken(value):
                return Denial("schema:not_json", "a text in the arguments holds half a character", True)
        elif isinstance(value, float):
            if not math.isfinite(value):
                return Denial("schema:not_json", "NaN and infinity are no JSON numbers", True)
        elif isinstance(value, dict | list | tuple):
            if depth > DEEPEST:
                return Denial("schema:too_large", f"the arguments are nested more than {DEEPEST} deep", True)
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            rest += [(each, depth + 1) for each in inner]
        if chars > MOST_CHARS or values + len(rest) > MOST_VALUES:
            return Denial("schema:too_large", "the arguments are too large", True)
    return None


def _is_plain(value: Any) -> bool:
    return type(value) is str and value.isascii() and len(value) < MOST_CHARS // (2 * _FEW)


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False

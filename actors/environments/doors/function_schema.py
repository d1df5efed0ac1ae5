"""A typed Python function as a tool: its JSON Schema, and the model's arguments checked against it.

Types and defaults come from the signature, through pydantic; descriptions from the docstring, in Google, NumPy or reST
style, or where it says nothing from `Annotated[int, "text"]`. A default of None makes null an argument too. Arguments
are read as pydantic reads JSON, and nothing is cut or guessed; behind the gateway they have passed the schema already.
What cannot be read says why, in words for the model (case X1).
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from headrace.actors.call_text import is_json_text, shown_value, usage
from headrace.actors.environments.doors.declared import declared
from headrace.actors.environments.doors.session import Session
from headrace.actors.frames import defined_at
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MOST_PROBLEMS = 3


class InvalidArguments(Exception):
    """The model called a tool in a way that it cannot be called. The message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolFunction:
    """A function that a model can call.

    `session` is the name of the parameter that gets the `Session`, empty where there is none. `usage` is the call in
    short, such as `add(a: integer, b: integer = 1)`.
    """

    function: Callable[..., Any]
    spec: ToolSpec
    usage: str
    session: str
    arguments: type[BaseModel]

    def read(self, given: Any) -> dict[str, Any]:
        """Checked and converted arguments, defaults included.

        Raises:
            InvalidArguments: names the tool, the argument and what was expected.
        """
        if not isinstance(given, dict):
            kind = "a string that holds JSON" if isinstance(given, str) else type(given).__name__
            raise InvalidArguments(f"{self.usage}: the arguments must be a JSON object, not {kind}")
        try:
            values = self.arguments.model_validate(given)
        except ValidationError as error:
            raise InvalidArguments(f"{self.usage}: {self._problems(error)}") from None
        fields = self.arguments.model_fields
        return {field.alias or name: getattr(values, name) for name, field in fields.items()}

    def _problems(self, error: ValidationError) -> str:
        known = list(self.spec.parameters["properties"])
        return "; ".join(_problem(dict(each), known) for each in error.errors(include_url=False)[:_MOST_PROBLEMS])


def tool_function(function: Callable[..., Any]) -> ToolFunction:
    """`function` as a tool.

    Args:
        function: a function or bound method, plain or async. Every parameter has a type and can be given by name; one
            annotated `headrace.Session`, or with None beside it, is filled in by headrace.

    Raises:
        ConfigError: names the file, the line and the parameter that cannot be shown to a model.
    """
    if not (inspect.isfunction(function) or inspect.ismethod(function)) or not function.__name__.isidentifier():
        raise ConfigError(f"a tool must be a function with a name, not {function!r:.80}")
    name, where = function.__name__, f"{defined_at(function)}: {function.__name__}"
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are foreign code
        raise ConfigError(f"{where}: its annotations cannot be read: {error}") from None
    text = docstring_parser.parse(inspect.getdoc(function) or "")
    described = {each.arg_name: each.description or "" for each in text.params}
    fields: dict[str, Any] = {}
    session = ""
    for number, (parameter, details) in enumerate(inspect.signature(function).parameters.items()):
        _check(details, hints, where)
        hint = hints[parameter]
        if _is_session(hint):
            if session:
                raise ConfigError(f"{where}: {session!r} and {parameter!r} are both the Session; one is enough")
            session = parameter
            continue
        description = described.get(parameter) or _annotated_text(hint)
        told: dict[str, Any] = {"description": description} if description else {}
        default = ... if details.default is details.empty else details.default
        # An alias, for pydantic has names of its own, such as `schema`.
        fields[f"argument_{number}"] = (_with_null(hint, default), Field(default, alias=parameter, **told))
    arguments, schema = _model(name, fields, where)
    summary = "\n".join(filter(None, (text.short_description, text.long_description)))
    spec = declared(function, ToolSpec(name=name, description=summary, parameters=schema), where)
    return ToolFunction(function=function, spec=spec, usage=usage(spec), session=session, arguments=arguments)


def _without_null(hint: Any) -> list[Any]:
    """The types that `hint` is a union of, other than None, without what annotates them."""
    if typing.get_origin(hint) is Annotated:
        return _without_null(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(hint) for each in _without_null(part)]
    return [] if hint in (None, type(None)) else [hint]


def _is_session(hint: Any) -> bool:
    return _without_null(hint) == [Session]


def _annotated_text(hint: Any) -> str:
    """The first text of an `Annotated` type; empty where there is none."""
    is_annotated = typing.get_origin(hint) is Annotated
    return next((each for each in typing.get_args(hint)[1:] if isinstance(each, str)), "") if is_annotated else ""


def _with_null(hint: Any, default: Any) -> Any:
    """`hint`, with null where that is the default and the type has forgotten it."""
    try:
        is_forgotten = default is None and TypeAdapter(hint).validate_python(None) is not None
    except ValidationError:
        is_forgotten = True
    except PydanticUserError:  # what cannot be shown to a model is refused with the others
        is_forgotten = False
    return hint | None if is_forgotten else hint


def _check(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str) -> None:
    if parameter.kind not in _BY_NAME:
        raise ConfigError(f"{where}: the parameter {parameter} cannot be given by name; a model gives arguments so")
    if parameter.name not in hints:
        raise ConfigError(f"{where}: the parameter {parameter.name!r} has no type; write {parameter.name}: int, say")


def _model(name: str, fields: dict[str, Any], where: str) -> tuple[type[BaseModel], dict[str, Any]]:
    """The model that checks arguments, and its JSON Schema."""
    try:
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = _plain_schema(model.model_json_schema())
    except PydanticUserError as error:
        raise ConfigError(f"{where}: a model cannot give arguments of these types: {error.message}") from None
    schema.pop("additionalProperties", None)  # said by every tool alike, and every word costs tokens
    schema.pop("description", None)
    schema.setdefault("properties", {})
    return model, schema


def _plain_schema(node: Any) -> Any:
    """A JSON Schema without the titles that pydantic makes out of names; a property called `title` stays."""
    if isinstance(node, list):
        return [_plain_schema(each) for each in node]
    if not isinstance(node, dict):
        return node
    plain: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            plain[key] = {name: _plain_schema(each) for name, each in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            plain[key] = value
        elif key != "title":
            plain[key] = _plain_schema(value)
    return plain


def _problem(error: dict[str, Any], known: list[str]) -> str:
    """One thing that is wrong, for the model."""
    place = ".".join(map(str, error["loc"])) or "the arguments"
    if error["type"] == "missing":
        return f"{place} is missing"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(place, known, n=1)
        return f"there is no argument {place}" + (f", only {near[0]}" if near else "")
    message = str(error["msg"])
    given = error["input"]
    text = f"{place}: {message[0].lower()}{message[1:]}, not {shown_value(given)}"
    return f"{text}, which is JSON in a string; give the value itself" if is_json_text(given) else text

"""Typed functions as tools: their schemas, and what the model is told when it calls them wrongly (case X1)."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field

import headrace
from headrace.actors.environments.doors.function_schema import InvalidArguments, tool_function
from headrace.platform.errors import ConfigError
from headrace.platform.testing.conformance.support import survives_json


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


def google(city: str, days: int = 1) -> str:
    """Say how the weather will be.

    It is never wrong.

    Args:
        city: where, such as Lyon.
        days: how many days ahead.

    Returns:
        A sentence.
    """
    return f"{city} {days}"


def numpy_style(city: str, days: int = 1) -> str:
    """Say how the weather will be.

    It is never wrong.

    Parameters
    ----------
    city : str
        where, such as Lyon.
    days : int
        how many days ahead.
    """
    return f"{city} {days}"


def rest(city: str, days: int = 1) -> str:
    """Say how the weather will be.

    It is never wrong.

    :param city: where, such as Lyon.
    :param days: how many days ahead.
    """
    return f"{city} {days}"


@pytest.mark.parametrize("function", [google, numpy_style, rest])
def test_signature_and_docstring_make_the_schema(function):
    spec = tool_function(function).spec
    assert (spec.name, spec.description) == (function.__name__, "Say how the weather will be.\nIt is never wrong.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where, such as Lyon."},
            "days": {"type": "integer", "default": 1, "description": "how many days ahead."},
        },
        "required": ["city"],
    }


def everything(
    text: str,
    ratio: float,
    flag: bool,
    names: list[str],
    counts: dict[str, int],
    colour: Colour,
    size: Literal["small", "large"],
    point: Point,
    limit: Optional[int] = None,  # noqa: UP045 - both spellings are in use
    other: int | None = None,
    share: Annotated[float, Field(ge=0, le=1, description="of all")] = 0.5,
    anything: Any = None,
    title: str = "no title",
    schema: str = "",
    model_config: str = "",
):
    """."""
    return text, ratio, flag, names, counts, colour, size, point, limit, other, share, anything, title, schema


GIVEN = {
    "text": "a",
    "ratio": 1,
    "flag": True,
    "names": ["x"],
    "counts": {"a": 1},
    "colour": "red",
    "size": "small",
    "point": {"x": 1},
}


def test_all_kinds_of_types():
    tool = tool_function(everything)
    properties = tool.spec.parameters["properties"]
    assert list(properties) == list(everything.__annotations__)
    assert tool.spec.parameters["required"] == list(GIVEN)
    assert survives_json(tool.spec.parameters)
    assert properties["size"] == {"enum": ["small", "large"], "type": "string"}
    assert properties["share"]["description"] == "of all"
    assert "title" not in properties["title"]
    values = tool.read(GIVEN)
    assert (values["colour"], values["point"], values["limit"], values["share"]) == (Colour.RED, Point(1), None, 0.5)
    assert list(values) == list(everything.__annotations__)


def test_what_is_unambiguous_is_taken():
    assert tool_function(google).read({"city": "Lyon", "days": "3"}) == {"city": "Lyon", "days": 3}


def test_defaults_are_not_shared_between_calls():
    def collect(item: int, into: list[int] = []) -> list[int]:  # noqa: B006 - that is what is tested
        return [*into, item]

    tool = tool_function(collect)
    first = tool.read({"item": 1})["into"]
    first.append(1)
    assert tool.read({"item": 2})["into"] == []  # case X13


# case X1
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "google(city: string, days: integer = 1): city is missing"),
        ({"city": "Lyon", "day": 2}, "there is no argument day, only days"),
        ({"city": "Lyon", "x": 2}, "there is no argument x"),
        ({"city": 5}, "city: input should be a valid string, not 5"),
        (
            {"city": "Lyon", "days": "two"},
            "days: input should be a valid integer, unable to parse string as an integer",
        ),
        ({"city": "Lyon", "days": None}, "days: input should be a valid integer, not null"),
        ({"city": "Lyon", "days": 1.5}, "days: input should be a valid integer"),
        ('{"city": "Lyon"}', "the arguments must be a JSON object, not a string that holds JSON"),
        (["Lyon"], "the arguments must be a JSON object, not list"),
    ],
)
def test_wrong_calls_are_explained_to_the_model(given, message):
    with pytest.raises(InvalidArguments) as caught:
        tool_function(google).read(given)
    assert str(caught.value).startswith("google(city: string, days: integer = 1): ")
    assert message in str(caught.value)


# case X1
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"point": '{"x": 1}'}, "which is JSON in a string; give the value itself"),
        ({"names": '["x"]'}, "which is JSON in a string; give the value itself"),
        ({"point": {"y": 1}}, "point.x is missing"),
        ({"names": ["x", 5]}, "names.1: input should be a valid string, not 5"),
        ({"colour": "green"}, "colour: input should be 'red' or 'blue', not \"green\""),
        ({"size": "huge"}, "size: input should be 'small' or 'large'"),
        ({"share": 2}, "share: input should be less than or equal to 1, not 2"),
        ({"text": ["long"] * 100}, 'text: input should be a valid string, not ["long", "long", '),
    ],
)
def test_wrong_values_are_named(changed, message):
    with pytest.raises(InvalidArguments) as caught:
        tool_function(everything).read(GIVEN | changed)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600, "what the model sent is cut short"


def test_usage_names_types_in_short():
    usage = tool_function(everything).usage
    for part in ("names: array of string", 'colour: "red" or "blue"', "point: object", "limit: integer or null = null"):
        assert part in usage


def test_the_session_is_not_shown():
    def roll(session: headrace.Session, sides: int = 6) -> int:
        return session.random.randint(1, sides)

    tool = tool_function(roll)
    assert tool.session == "session"
    assert list(tool.spec.parameters["properties"]) == ["sides"]
    assert tool.read({}) == {"sides": 6}
    with pytest.raises(InvalidArguments, match="no argument session"):
        tool.read({"session": {}})


@pytest.mark.parametrize(
    "kind",
    [
        headrace.Session | None,
        Optional[headrace.Session],  # noqa: UP045 - both spellings are in use
        Annotated[headrace.Session, "the episode"],
        Annotated[headrace.Session | None, "the episode"],
        "headrace.Session | None",
    ],
)
def test_the_session_is_not_shown_however_it_is_written(kind):
    def roll(sides: int = 6, session: kind = None) -> int:
        return sides

    tool = tool_function(roll)
    assert (tool.session, list(tool.spec.parameters["properties"])) == ("session", ["sides"])
    with pytest.raises(InvalidArguments, match="no argument session"):
        tool.read({"session": {"task": {}, "seed": 1}})


@dataclass
class Holds:
    session: headrace.Session


@pytest.mark.parametrize("kind", [list[headrace.Session], dict[str, headrace.Session], int | headrace.Session, Holds])
@pytest.mark.parametrize("default", [..., None])
def test_a_session_inside_of_an_argument_is_refused(kind, default):
    def roll(sides: kind) -> None: ...

    roll.__defaults__ = None if default is ... else (default,)
    with pytest.raises(
        ConfigError, match=r"roll: a model cannot give .*: headrace\.Session can only be a parameter by"
    ):
        tool_function(roll)


def test_one_session_is_enough():
    def roll(a: headrace.Session, b: headrace.Session) -> None: ...

    with pytest.raises(ConfigError, match="roll: 'a' and 'b' are both the Session"):
        tool_function(roll)


def test_a_default_of_none_takes_null():
    def find(
        text: str,
        limit: int = None,  # noqa: RUF013 - people write so
        share: Annotated[float, Field(ge=0), "of all"] = None,  # noqa: RUF013
        size: Literal["small"] = None,  # noqa: RUF013
        anything: Any = None,
    ) -> None:
        """Find it."""

    tool = tool_function(find)
    limit, share = (tool.spec.parameters["properties"][name] for name in ("limit", "share"))
    assert limit == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    assert share["description"] == "of all"
    nothing = {"text": "a", "limit": None, "share": None, "size": None, "anything": None}
    assert tool.read({"text": "a"}) == tool.read(nothing) == nothing
    assert tool.read({"text": "a", "limit": "3"})["limit"] == 3
    with pytest.raises(InvalidArguments, match=r"share.*greater than or equal to 0"):
        tool.read({"text": "a", "share": -1})


def test_an_annotated_text_describes_where_the_docstring_does_not():
    def find(a: Annotated[int, "the first"], b: Annotated[int, "not this", 5], c: Annotated[int, Field(gt=0)]) -> None:
        """Find it.

        Args:
            b: the second.
        """

    properties = tool_function(find).spec.parameters["properties"]
    assert [each.get("description") for each in properties.values()] == ["the first", "the second.", None]


def test_a_tool_may_take_nothing_and_be_a_method():
    class Clock:
        def now(self) -> int:
            return 7

    tool = tool_function(Clock().now)
    assert tool.spec.parameters == {"type": "object", "properties": {}}
    assert (tool.read({}), tool.usage, tool.function()) == ({}, "now()", 7)


def untyped(a: int, b):
    """."""


def spread(*numbers: int):
    """."""


def named(**numbers: int):
    """."""


def misspelt(a: "Itn"):  # noqa: F821 - that is what is tested
    """."""


class Opaque:
    """No JSON is one."""


def opaque(a: Opaque):
    """."""


def callback(a: Callable[[int], int]):
    """."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "the parameter 'b' has no type; write b: int"),
        (spread, r"the parameter \*numbers: int cannot be given by name"),
        (named, r"the parameter \*\*numbers: int cannot be given by name"),
        (misspelt, "its annotations cannot be read: name 'Itn' is not defined"),
        (opaque, "a model cannot give arguments of these types"),
        (callback, "a model cannot give arguments of these types"),
    ],
)
def test_functions_that_cannot_be_shown_are_refused_by_file_and_line(function, message):
    place = rf"^test_function_schema\.py:{function.__code__.co_firstlineno}: {function.__name__}: "
    with pytest.raises(ConfigError, match=place + message):
        tool_function(function)


@pytest.mark.parametrize("thing", [5, lambda a: a, dict, print])
def test_what_is_no_named_function_is_refused(thing):
    with pytest.raises(ConfigError, match="a tool must be a function with a name"):
        tool_function(thing)

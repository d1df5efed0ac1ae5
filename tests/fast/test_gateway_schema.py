"""Whether a call is one, and what the model is told where it is none (case X1)."""

import pytest

from headrace.actors.gateway.decisions import schema
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.policy import Policy
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolCall, ToolSpec

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1, "maximum": 5},
        "how": {"enum": ["fast", "exact"]},
        "options": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "rows": {"type": "array", "items": {"type": "object"}},
        "note": {"type": "string", "minLength": 2, "default": "none"},
    },
    "required": ["a"],
}


def decide(arguments, name="add", parameters=ADD):
    spec = ToolSpec("add", parameters=parameters)
    specs = {"add": spec, "remove": ToolSpec("remove")}
    state = EpisodeState("e/0#1", Policy(), specs, frozenset(), (), 0.0)
    return schema.check(Asked(ToolCall(name, arguments), spec, "e/0/0/0", here=False), state)


@pytest.mark.parametrize(
    "arguments",
    [{"a": 1}, {"a": 5, "how": "fast"}, {"a": 1, "options": None, "rows": [{}]}, {"a": 2, "options": {"deep": [1]}}],
)
def test_what_fits_passes(arguments):
    assert decide(arguments) is None


# case X1: the observation names the place, what was expected, and what came
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "a is missing"),
        ({"a": "3"}, 'a: must be integer, not "3"'),
        ({"a": 1.5}, "a: must be integer, not 1.5"),
        ({"a": True}, "a: must be integer, not true"),
        ({"a": 9}, "a: is greater than the maximum of 5, not 9"),
        ({"a": 1, "how": "slow"}, 'how: must be one of "fast", "exact", not "slow"'),
        ({"a": 1, "options": 3}, "options: fits none of the forms that it can have, not 3"),
        ({"a": 1, "rows": [{}, 4]}, "rows.1: must be object, not 4"),
        ({"a": 1, "nots": "hm"}, "there is no argument nots, only note"),
        ({"a": 1, "zzzzzz": "hm"}, "there is no argument zzzzzz"),
        ({"a": 1, "note": "x"}, 'note: is shorter than 2 characters, not "x"'),
    ],
)
def test_what_does_not_fit_is_a_mistake_of_the_model(arguments, told):
    denial = decide(arguments)
    assert (denial.rule, denial.invalid) == ("schema:arguments", True)
    assert denial.told.startswith('add(a: integer, how?: "fast" or "exact", options?: object or null, rows?: array of')
    assert denial.told.endswith(f": {told}")


def test_several_mistakes_are_told_at_once_though_not_all_of_many():
    denial = decide({"a": 0, "how": "x", "rows": 1, "note": 1})
    assert denial.told.count("; ") == 2


def test_what_the_model_gave_is_shown_in_short():
    denial = decide({"a": 1, "how": "z" * 100_000})
    assert len(denial.told) < 300 and "zzz…" in denial.told


# case X1: JSON in a string
@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"a": 1, "rows": '[{"x": 1}]'}, "rows"),
        ({"a": 1, "options": ' {"x": 1}'}, "options"),
        ({"a": 1, "rows": [{}, "{}"]}, "rows.1"),
    ],
)
def test_json_in_a_string_is_told_apart(arguments, place):
    denial = decide(arguments)
    assert (denial.rule, denial.invalid) == ("schema:json_in_string", True)
    assert f"{place}: " in denial.told
    assert denial.told.endswith("is JSON in a string; give the object or array itself")


def test_a_string_that_only_looks_like_json_is_a_wrong_type():
    assert decide({"a": 1, "rows": "[1, 2"}).rule == "schema:arguments"
    assert decide({"a": 1, "note": '{"x": 1}'}) is None


@pytest.mark.parametrize("arguments", ['{"a": 1}', [1], None])
def test_arguments_are_an_object(arguments):
    denial = decide(arguments)
    assert (denial.rule, denial.invalid) == ("schema:arguments", True)
    assert "the arguments must be a JSON object" in denial.told


def test_an_unknown_tool_names_the_nearest_and_all():
    denial = decide({}, name="ad")
    assert (denial.rule, denial.invalid) == ("schema:unknown_tool", True)
    assert denial.told == 'there is no tool "ad"; did you mean add? the tools are: add, remove'


def test_the_name_of_an_unknown_tool_is_shown_in_short():
    assert len(decide({}, name="x" * 10_000).told) < 150


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_lacks_is_refused_at_any_depth(number):
    assert decide({"a": 1, "options": {"x": [number]}}).rule == "schema:not_json"


def test_half_a_character_is_refused_also_as_a_name():
    assert decide({"a": 1, "note": "x\ud800"}).rule == "schema:not_json"
    assert decide({"a": 1, "options": {"\udfff": 1}}).rule == "schema:not_json"


def test_arguments_are_bounded():
    deep = {"a": 1}
    for _ in range(schema.DEEPEST + 1):
        deep = {"x": deep}
    assert decide(deep).rule == "schema:too_large"
    assert decide({"note": "x" * (schema.MOST_CHARS + 1)}).rule == "schema:too_large"
    assert decide({"rows": [0] * (schema.MOST_VALUES + 1)}).rule == "schema:too_large"


def test_a_number_of_any_size_is_looked_at():
    assert "not 1000000000000000000000000000000" in decide({"a": 10**30}).told


def test_a_tool_without_a_schema_takes_anything():
    assert decide({"whatever": [1]}, parameters={}) is None


def test_undeclared_arguments_are_refused_unless_the_schema_lets_them_be():
    closed = {"type": "object", "properties": {}}
    assert decide({"path": "x"}, parameters=closed).told == "add(): there is no argument path"
    assert decide({"path": "x"}, parameters={**closed, "additionalProperties": True}) is None
    assert decide({"path": "x"}, parameters={"properties": {}, "patternProperties": {"^p": {"type": "string"}}}) is None


# A tool whose schema is none is at fault, not the model.
@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "nonsense"},
        {"properties": {"a": {"pattern": "("}}},
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://127.0.0.1:9/schema"},
        {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
    ],
)
def test_a_schema_that_is_none_is_the_tools_fault_and_nothing_is_fetched(parameters):
    with pytest.raises(ConfigError, match="the parameters of the tool 'add' are no JSON Schema"):
        decide({"a": "x"}, parameters=parameters)


def test_a_pattern_that_backtracks_without_end_is_a_no():
    parameters = {"properties": {"a": {"type": "string", "pattern": "^(a|a)*(?=b)c$"}}}
    assert decide({"a": "a" * 64}, parameters=parameters).invalid


def test_schemas_are_read_once_for_equal_tools():
    one, other = ToolSpec("x", parameters=dict(ADD)), ToolSpec("y", parameters=dict(ADD))
    assert schema.validator_of(one) is schema.validator_of(other)

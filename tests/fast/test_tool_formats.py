"""How tool calls are read, and what a model is told when they cannot be."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.rendering.tool_formats import build_tool_format
from headrace.platform.errors import ConfigError
from headrace.platform.records import ToolCall

INLINE = build_tool_format("inline", {"get": ["key"], "put": ["key", "value"], "now": []})
HERMES = build_tool_format("hermes", {})


def block(body):
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("v31", "v31", ()),
        ("", "", ()),
        ("<call>get k07</call>", "", (ToolCall("get", {"key": "k07"}, "call_0"),)),
        ("so <call>now</call>", "so ", (ToolCall("now", {}, "call_0"),)),
        (
            "<call>put a b</call><call>get  c </call>",
            "",
            (ToolCall("put", {"key": "a", "value": "b"}, "call_0"), ToolCall("get", {"key": "c"}, "call_1")),
        ),
        ("<call>fly away</call>", "", (ToolCall("fly", {}, "call_0"),)),
        ("<call></call>", "", (ToolCall("", {}, "call_0"),)),
    ],
)
def test_inline_calls_are_read(text, content, calls):
    parsed = INLINE.parse(text)
    assert (parsed.content, parsed.tool_calls, parsed.error) == (content, calls, "")


# case X1
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<call>get k07", "not closed"),
        ("<call>get <call>get k07</call>", "not closed"),
        ("<call>get k07</call><call>get", "not closed"),
        ("<call>get</call>", "get takes 1 arguments: key"),
        ("<call>get a b</call>", "get takes 1 arguments: key"),
        ("<call>get k07</call>v31", "nothing may follow"),
        ("<call>get k07</call> <call>get k08</call>", "nothing may follow"),
        ("v31</call>", "closes no tool call"),
        ("</call><call>get k07</call>", "closes no tool call"),
        ("<call>get k07</call></call>", "nothing may follow"),
    ],
)
def test_inline_calls_that_cannot_be_read_are_explained(text, error):
    parsed = INLINE.parse(text)
    assert error in parsed.error
    assert parsed.tool_calls == ()


def test_hermes_calls_are_read():
    parsed = HERMES.parse(f"<think>\nhm\n</think>\n\nso{block(json.dumps({'name': 'f', 'arguments': {'a': 'é'}}))}")
    assert (parsed.reasoning, parsed.content, parsed.error) == ("hm", "so", "")
    assert parsed.tool_calls == (ToolCall("f", {"a": "é"}, "call_0"),)
    assert HERMES.parse(block('{"name": "f"}') * 2).tool_calls == (
        ToolCall("f", {}, "call_0"),
        ToolCall("f", {}, "call_1"),
    )


# case X1
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "f"', "not closed"),
        ("</tool_call>", "not closed"),
        ('</tool_call><tool_call>{"name": "f"}', "stands before"),
        (block("<tool_call>{}</tool_call>"), "not valid JSON"),
        (block('{"name": "f", "arguments": {"a": 1'), "not valid JSON"),
        (block('{"name": "f", "arguments": "{}"}'), '"arguments" of f must be a JSON object, not str'),
        (block('{"name": "f", "arguments": null}'), "must be a JSON object"),
        (block('{"name": 1}'), 'with "name" and "arguments"'),
        (block("[1]"), 'with "name" and "arguments"'),
        (block(""), "not valid JSON"),
        (block('{"name": "f", "arguments": {"a": NaN}}'), "NaN is not a number"),
        (block('{"name": "f", "arguments": {"a": -Infinity}}'), "-Infinity is not a number"),
        (block('{"name": "f", "arguments": {"a": 1' + "0" * 400 + "}}"), "not valid JSON"),
        (block('{"name": "f", "arguments": {"a": 1' + "0" * 9000 + "}}"), "not valid JSON"),
        (block('{"name": "f", "arguments": {"a": "\\ud800"}}'), "not valid JSON"),
        (block('{"name": "\\udfff"}'), "not valid JSON"),
        (block('{"name": "f", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}"), "not valid JSON"),
        (block('{"name": "f", "arguments": ' + '{"a":' * 2000 + "1" + "}" * 2000 + "}"), "not valid JSON"),
    ],
)
def test_hermes_calls_that_cannot_be_read_are_explained(text, error):
    parsed = HERMES.parse(text)
    assert error in parsed.error
    assert parsed.tool_calls == ()
    parsed.error.encode()


# case X2
def test_a_call_inside_an_unclosed_thought_is_no_call():
    parsed = HERMES.parse(f"<think>hm {block(json.dumps({'name': 'f'}))}")
    assert (parsed.tool_calls, parsed.content, parsed.error) == ((), "", "")
    assert parsed.reasoning.startswith("hm <tool_call>")
    assert HERMES.parse(" <think>hm</think>so").reasoning == "hm"
    assert HERMES.parse("hm</think>so").reasoning == "hm", "the template has opened the thought"


tags = st.sampled_from(
    ["<call>", "</call>", "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"}', "get k"]
)


@given(st.lists(tags | st.text(st.characters(codec="utf-8"), max_size=6), max_size=8).map("".join))
def test_whatever_is_said_is_read_and_can_be_stored(text):
    for tool_format in (INLINE, HERMES):
        msgspec.msgpack.encode(tool_format.parse(text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(), values, max_size=2),
    max_leaves=4,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), json_values, max_size=2))
def test_arguments_are_read_as_written_or_refused(arguments):
    """case X1: whatever JSON a model writes, the episode that holds it can be stored."""
    parsed = HERMES.parse(block(json.dumps({"name": "f", "arguments": arguments}).replace("</tool_call>", "")))
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(parsed), type=type(parsed))
    assert stored == parsed
    assert parsed.error or parsed.tool_calls[0].arguments == arguments


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="known: hermes, inline"):
        build_tool_format("xml", {})

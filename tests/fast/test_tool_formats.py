"""How tool calls are read, and what a model is told when they cannot be."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.rendering.tool_formats import build_tool_format, tool_format_of
from headrace.actors.rendering.tool_formats.deepseek import bar_token
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
        ("</tool_call>", "without its <tool_call>"),
        ('</tool_call><tool_call>{"name": "f"}', "not closed"),
        (block('{"name": "f"}') + "</tool_call>", "without its <tool_call>"),
        (block('{"name": "f"}}'), "not valid JSON: Extra data"),
        (block('{"name": "f", "parameters": {"a": 1}}'), 'not "parameters"; arguments stand in "arguments"'),
        (block('{"name": "f", "args": {"a": 1}}'), 'not "args"'),
        (block('{"name": "f", "input": {"a": 1}}'), 'not "input"'),
        (block('{"name": "f", "arguments": {}, "k": 1}'), 'not "k"'),
        (block('{"type": "function", "function": {"name": "f"}}'), 'with "name" and "arguments"'),
        (block('{"name": "f", "arguments": {"a": 1}, "arguments": {}}'), 'the key "arguments" is given twice'),
        (block('{"name": "f", "arguments": {"a": 1, "a": 2}}'), 'the key "a" is given twice'),
        (block('{"name": "f", "arguments": {"a": "</tool_call>'), "not valid JSON"),
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
        (block('{"name": "f", "arguments": {"a": 1e999}}'), "not valid JSON: 1e999 is beyond"),
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


def test_keys_that_say_nothing_more_are_allowed():
    call = {"id": "c1", "type": "function", "name": "f", "arguments": {"a": 1}}
    assert HERMES.parse(block(json.dumps(call))).tool_calls == (ToolCall("f", {"a": 1}, "call_0"),)


QUOTED = "</tool_call>", "<tool_call>", "<think>", "</think>", "<tool_call></think></tool_call>"


@pytest.mark.parametrize("text", QUOTED)
def test_a_tag_inside_of_an_argument_is_part_of_it(text):
    for tool_format, call in (
        (HERMES, block(json.dumps({"name": "f", "arguments": {"a": text}}))),
        (CODER, function(parameter("a", text))),
        (LLAMA, json.dumps({"name": "f", "parameters": {"a": text}})),
        (DEEPSEEK, f"{CALLS}{CALL}f{SEP}{json.dumps({'a': text})}{NO_CALL}{NO_CALLS}"),
    ):
        if tool_format is CODER and "<tool_call>" in text:
            continue  # what a parameter without an end would look like
        parsed = tool_format.parse(call)
        assert (parsed.content, parsed.reasoning, parsed.error) == ("", "", ""), tool_format.signature
        assert parsed.tool_calls == (ToolCall("f", {"a": text}, "call_0"),)
        again = tool_format.parse(f"<think>hm</think>{call}")
        assert (again.reasoning, again.tool_calls) == ("hm", parsed.tool_calls)


def test_a_parameter_that_is_not_closed_does_not_swallow_the_next_call():
    """case X1"""
    parsed = CODER.parse(block("<function=f><parameter=a>1</function>") + function(parameter("a", 2)))
    assert "every parameter is" in parsed.error


# case X2
def test_what_is_said_before_a_thought_is_no_thought():
    call = block(json.dumps({"name": "f"}))
    parsed = HERMES.parse(f"hi <think>x</think>{call}")
    assert (parsed.content, parsed.reasoning, len(parsed.tool_calls)) == ("hi", "x", 1)
    unclosed = HERMES.parse(f"hi <think>x {call}")
    assert (unclosed.content, unclosed.reasoning, unclosed.tool_calls) == ("hi", f"x {call}", ())
    second = HERMES.parse(f"<think>x</think>hi <think>y</think>{call}<think>z {call}")
    assert (second.content, second.reasoning, len(second.tool_calls)) == ("hi", f"x\ny\nz {call}", 1)
    before = HERMES.parse(f"{call} <think>x")
    assert (before.reasoning, len(before.tool_calls)) == ("x", 1)


# case X2
def test_a_thought_may_mention_tags_of_calls():
    parsed = HERMES.parse(f"<think>a <tool_call> is needed</think>so{block(json.dumps({'name': 'f'}))}")
    assert (parsed.reasoning, parsed.content, len(parsed.tool_calls)) == ("a <tool_call> is needed", "so", 1)


# case X2
def test_a_call_inside_an_unclosed_thought_is_no_call():
    parsed = HERMES.parse(f"<think>hm {block(json.dumps({'name': 'f'}))}")
    assert (parsed.tool_calls, parsed.content, parsed.error) == ((), "", "")
    assert parsed.reasoning.startswith("hm <tool_call>")
    assert HERMES.parse(" <think>hm</think>so").reasoning == "hm"
    assert HERMES.parse("hm</think>so").reasoning == "hm", "the template has opened the thought"


CODER = build_tool_format("qwen3-coder", {})
LLAMA = build_tool_format("llama-3", {})
DEEPSEEK = build_tool_format("deepseek", {})
GPT_OSS = build_tool_format("gpt-oss", {})
ALL = (INLINE, HERMES, CODER, LLAMA, DEEPSEEK, GPT_OSS, build_tool_format("hermes", {}, opened=True))
CALLS, NO_CALLS = bar_token("tool calls begin"), bar_token("tool calls end")
CALL, NO_CALL, SEP = bar_token("tool call begin"), bar_token("tool call end"), bar_token("tool sep")


def parameter(key, value):
    return f"<parameter={key}>{value}</parameter>"


def function(*parameters, name="f"):
    return block(f"\n<function={name}>\n" + "\n".join(parameters) + "\n</function>\n")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\n5\n", "5"),
        ("12345", "12345"),
        ("-1.50", "-1.50"),
        ("\n [1]\n", [1]),
        ("[1", "[1"),
        ('{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ("\n[1, {}]\n", [1, {}]),
        ('{"a": null}', {"a": None}),
        ("true", "true"),
        ("null", "null"),
        ("True", "True"),
        ("\n  def f():\n    pass\n\n", "  def f():\n    pass\n"),
        ('"5"', '"5"'),
        ("", ""),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
        ("{'a': 1}", "{'a': 1}"),
        ("<b>&", "<b>&"),
    ],
)
def test_untyped_parameters_are_text_but_for_objects_and_lists(written, value):
    parsed = CODER.parse(f"so\n\n{function(parameter('k', written))}")
    assert (parsed.error, parsed.content) == ("", "so")
    assert parsed.tool_calls == (ToolCall("f", {"k": value}, "call_0"),)


def test_parallel_calls_are_read_in_every_format():
    fenced = "function{}{}\n```json\n{{}}\n```".format
    for tool_format, text in (
        (HERMES, block('{"name": "f"}') + "\n" + block('{"name": "g", "arguments": {}}')),
        (CODER, function() + "\n" + function(name="g")),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        (LLAMA, '<|python_tag|>{"name": "f"}\n{"name": "g", "arguments": {}}'),
        (DEEPSEEK, f"{CALLS}{CALL}{fenced(SEP, 'f')}{NO_CALL}\n{CALL}{fenced(SEP, 'g')}{NO_CALL}{NO_CALLS}"),
        (DEEPSEEK, f"{CALLS}{CALL}f{SEP}{{}}{NO_CALL}{CALL}g{SEP}{{}}{NO_CALL}{NO_CALLS}"),
        (
            GPT_OSS,
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
            "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        ),
    ):
        parsed = tool_format.parse(text)
        assert (parsed.content, parsed.error) == ("", "")
        assert parsed.tool_calls == (ToolCall("f", {}, "call_0"), ToolCall("g", {}, "call_1")), text


# case X1
@pytest.mark.parametrize(
    ("tool_format", "text", "error"),
    [
        (CODER, "<tool_call><function=f>", "not closed with </tool_call>"),
        (CODER, block("<function=f>"), "a tool call is <function=NAME>"),
        (CODER, block("<function=>\n</function>"), "a tool call is <function=NAME>"),
        (CODER, block('{"name": "f"}'), "a tool call is <function=NAME>"),
        (CODER, function("<parameter=k>1"), "f: every parameter is"),
        (CODER, function("say", parameter("k", 1)), "f: every parameter is"),
        (CODER, function(parameter("k", 1), "say"), "f: every parameter is"),
        (CODER, function(parameter("k", 1), parameter("k", 2)), "the parameter k is given twice"),
        (LLAMA, '{"name": "f", "parameters": {"a": 1', "not valid JSON"),
        (LLAMA, '{"name": "f", "parameters": "{}"}', '"parameters" of f must be a JSON object, not str'),
        (LLAMA, '{"name": "f", "parameters": {}} done', "nothing may follow"),
        (LLAMA, '{"name": "f", "parameters": {}}; so', "not valid JSON"),
        (LLAMA, '<|python_tag|>print("x")', "not valid JSON"),
        (LLAMA, '{"name": 1, "parameters": {}}', 'with "name" and "parameters"'),
        (LLAMA, '{"name": "f", "parameters": {}, "k": 1}', 'not "k"'),
        (LLAMA, '{"name": "f", "parameters": {}, "arguments": {"a": 1}}', 'not "arguments"'),
        (LLAMA, '<|python_tag|>{"name": "f", "input": {"a": 1}}', 'not "input"; arguments stand in "parameters"'),
        (DEEPSEEK, f"{CALLS}{CALL}function{SEP}f\n```json\n{{", "is not closed"),
        (DEEPSEEK, f"{CALLS}{CALL}function{SEP}f\n```json\n{{\n```{NO_CALL}{NO_CALLS}", "of f are not valid JSON"),
        (DEEPSEEK, f'{CALLS}{CALL}f{SEP}"{{}}"{NO_CALL}{NO_CALLS}', '"arguments" of f must be a JSON object, not str'),
        (DEEPSEEK, f"{CALLS}{CALL}f{NO_CALL}{NO_CALLS}", "before its name"),
        (DEEPSEEK, f"{CALLS}{CALL}{SEP}{{}}{NO_CALL}{NO_CALLS}", "has a name"),
        (DEEPSEEK, f"{CALLS}{NO_CALLS}", "every tool call begins with"),
        (DEEPSEEK, f"{CALLS}{CALL}f{SEP}{{}}{NO_CALLS}", "a call ends with"),
        (DEEPSEEK, f"{CALLS}{CALL}f{SEP}{{}}{NO_CALL}{NO_CALLS}done", "nothing may follow"),
        (DEEPSEEK, f"{CALL}f{SEP}{{}}{NO_CALL}", "stand between"),
        (GPT_OSS, '<|channel|>commentary to=functions.f<|message|>{"a": 1', "of f are not valid JSON"),
        (GPT_OSS, '<|channel|>commentary to=functions.f<|message|>"{}"', "must be a JSON object, not str"),
        (GPT_OSS, "<|channel|>commentary to=browser.open<|message|>{}", "there is no browser.open"),
        (GPT_OSS, "<|channel|>commentary to=functions.f", "a message has no <|message|>"),
    ],
)
def test_calls_that_cannot_be_read_are_explained(tool_format, text, error):
    parsed = tool_format.parse(text)
    assert error in parsed.error
    assert parsed.tool_calls == ()


def test_arguments_of_llama_may_be_called_as_their_key_is():
    for key, other in (("arguments", "parameters"), ("parameters", "arguments")):
        parsed = LLAMA.parse(json.dumps({"name": "get", key: {other: "a"}}))
        assert parsed.tool_calls == (ToolCall("get", {other: "a"}, "call_0"),)
    answer = '{"name": "Bob", "says": {"parameters": 1}}'
    assert LLAMA.parse(answer).content == answer


@pytest.mark.parametrize(
    "text", ["It is two.", '{"answer": 2}', '{"name": "Bob"}', 'so {"name": "f", "parameters": {}}']
)
def test_answers_of_llama_are_no_calls(text):
    parsed = LLAMA.parse(text)
    assert (parsed.content, parsed.tool_calls, parsed.error) == (text, (), "")


def test_channels_of_gpt_oss_are_told_apart():
    first = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = GPT_OSS.parse(f"{first}<|channel|>final<|message|>two")
    assert (final.reasoning, final.content, final.error) == ("hm", "two", "")
    aside = GPT_OSS.parse(f"{first}<|channel|>commentary<|message|>I shall look.<|end|>")
    assert (aside.reasoning, aside.content, aside.error) == ("hm", "I shall look.", "")
    beside = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|message|>{}"
    calling = GPT_OSS.parse(first + beside)
    assert (calling.reasoning, calling.content, len(calling.tool_calls)) == ("hm\nI look.", "", 1)
    assert GPT_OSS.parse("two").content == "two", "a model that uses no channel has said it all the same"


# case X2
def test_a_thought_that_the_prompt_has_opened_ends_where_it_is_closed():
    opened = build_tool_format("hermes", {}, opened=True)
    call = block('{"name": "f"}')
    assert opened.parse(f"hm {call}").tool_calls == ()
    assert opened.parse(f"hm {call}").reasoning == f"hm {call}"
    closed = opened.parse(f"hm {call}</think>so {call}")
    assert (closed.reasoning, closed.content, len(closed.tool_calls)) == (f"hm {call}", "so", 1)


def test_a_family_that_does_not_think_has_no_thoughts_taken_out():
    parsed = build_tool_format("hermes", {}, thinks=False).parse("<think>hm</think>so")
    assert (parsed.reasoning, parsed.content) == ("", "<think>hm</think>so")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("<|start|>{{ role }}<|channel|>{{ channel }}", "gpt-oss"),
        (f"{CALLS}{CALL}", "deepseek"),
        ("<tool_call><function={{ name }}>", "qwen3-coder"),
        ("<tool_call>{{ call | tojson }}", "hermes"),
        ("<|start_header_id|>{{ role }}", "llama-3"),
        ("<|im_start|>{{ role }}", "hermes"),
    ],
)
def test_a_template_tells_its_format(template, kind):
    assert tool_format_of(template) == kind


fragments = st.sampled_from(
    [
        *("<call>", "</call>", "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"}', "get k"),
        *("<function=f>", "</function>", "<parameter=k>", "</parameter>", '{"name": "f", "parameters": {', "}}", ";"),
        *(CALLS, NO_CALLS, CALL, NO_CALL, SEP, "function", "\n```json\n", "\n```", "{}", "<|python_tag|>"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "analysis", "commentary", "to=functions.f ", "to=x"),
    ]
)


@settings(max_examples=300)
@given(st.lists(fragments | st.text(st.characters(codec="utf-8"), max_size=6), max_size=10).map("".join))
def test_whatever_is_said_is_read_and_can_be_stored(text):
    for tool_format in ALL:
        parsed = tool_format.parse(text)
        msgspec.msgpack.encode(parsed)
        assert not (parsed.error and parsed.tool_calls)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.text(), values, max_size=2),
    max_leaves=4,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), json_values, max_size=2))
def test_arguments_are_read_as_written_or_refused(arguments):
    """case X1: whatever JSON a model writes, the episode that holds it can be stored."""
    parsed = HERMES.parse(block(json.dumps({"name": "f", "arguments": arguments})))
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(parsed), type=type(parsed))
    assert stored == parsed
    assert parsed.error or parsed.tool_calls[0].arguments == arguments


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="known: deepseek, gpt-oss, hermes, inline, llama-3, qwen3-coder"):
        build_tool_format("xml", {})

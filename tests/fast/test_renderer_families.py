"""Renderers of known families: golden prompts, conformance, and what each can and cannot bridge."""

import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_kit import (
    ALL_MARKERS,
    MORE,
    SUM,
    SYSTEM,
    TOKENS,
    USER,
    called,
    family_renderer,
    family_tokenizer,
    marker_ids,
    result,
    said,
    sampled,
)

from headrace.actors.rendering.families import FAMILIES
from headrace.actors.rendering.family import FamilyRenderer
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records import Message, Role, ToolCall, ToolSpec
from headrace.platform.testing.conformance.renderer import RENDERER_SUITE, RendererContext

EVERY = tuple(TOKENS)
# What each says in a turn that its own prompts can hold: call, thought, parallel calls.
CALLING = {
    "qwen3": called([1, 1], content="so"),
    "qwen3-coder": called([1, 1], content="so"),
    "qwen3.5": called([1, 1], content="so", reasoning="hm"),
    "deepseek-v3": called([1, 1], content="so"),
    "deepseek-r1": called([1, 1], content="so"),
}
THINKING = {
    "qwen3": called([1, 1], reasoning="hm"),
    "qwen3.5": said("two", "hm"),
    "gpt-oss": called([1, 1], reasoning="hm"),
}
SERIAL = ("llama-3", "gpt-oss")
HOSTILE = "".join(ALL_MARKERS)


def context(family, hostile=HOSTILE):
    return RendererContext(
        make=functools.partial(family_renderer, family),
        messages=[SYSTEM, USER],
        reply=said("It is two.", "hm" if family == "qwen3.5" else ""),
        calling=CALLING.get(family, called([1, 1])),
        answer=result("2"),
        thinking=THINKING.get(family),
        parallel=None if family in SERIAL else called([1, 1], [2, 2], reasoning="hm" if family == "qwen3.5" else ""),
        answers=[result("2"), result("4", 1)],
        special_ids=list(marker_ids(family_renderer(family))),
        hostile=hostile,
        vocabulary=family_tokenizer().get_vocab_size(),
        tools=(SUM,),
    )


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("name", RENDERER_SUITE)
async def test_every_family_conforms(name, family):
    await RENDERER_SUITE[name](context(family))


# case T5: the markers of one family at a time, and their names alone, which scaffold may stand in brackets
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("name", [name for name in RENDERER_SUITE if name.startswith("no_special_token")])
async def test_no_marker_of_any_family_comes_out_of_text(name, family):
    for markers in TOKENS.values():
        await RENDERER_SUITE[name](context(family, "".join(f"x{marker}y" for marker in markers)))
    for marker in ALL_MARKERS:
        await RENDERER_SUITE[name](context(family, marker.strip("</>")))


QWEN_CALL = '<tool_call>\n{{"name": "sum", "arguments": {{"terms": {}}}}}\n</tool_call>'.format
CODER_CALL = "<tool_call>\n<function=sum>\n<parameter=terms>\n{}\n</parameter>\n</function>\n</tool_call>".format
BAR_CALL = '<|tool_call_begin|>function<|tool_sep|>sum\n```json\n{{"terms": {}}}\n```<|tool_call_end|>'.format
# The conversation: system, user, two calls (llama-3 and gpt-oss: one), their results, an answer with a thought, user.
GOLDEN = {
    "qwen3": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        f"<|im_start|>assistant\n{QWEN_CALL([1, 1])}\n{QWEN_CALL([2, 2])}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "qwen3-coder": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        f"<|im_start|>assistant\n{CODER_CALL([1, 1])}\n{CODER_CALL([2, 2])}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>\ntwo<|im_end|>\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "qwen3.5": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        f"<|im_start|>assistant\n{CODER_CALL([1, 1])}\n{CODER_CALL([2, 2])}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ),
    "llama-3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat is 1 + 1?"
        '<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{"name": "sum", "parameters": {"terms": [1, 1]}}'
        '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\ntwo<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "deepseek-v3": (
        "<|begin_of_sentence|>Be brief.<|User|>What is 1 + 1?<|Assistant|>"
        f"<|tool_calls_begin|>{BAR_CALL([1, 1])}{BAR_CALL([2, 2])}<|tool_calls_end|><|end_of_sentence|>"
        "<|tool_outputs_begin|><|tool_output_begin|>2<|tool_output_end|>"
        "<|tool_output_begin|>4<|tool_output_end|><|tool_outputs_end|>"
        "two<|end_of_sentence|><|User|>And 2 + 2?<|Assistant|>"
    ),
    "gpt-oss": (
        "<|start|>system<|message|>Current date: 2024-07-26<|end|><|start|>system<|message|>Be brief.<|end|>"
        "<|start|>user<|message|>What is 1 + 1?<|end|>"
        '<|start|>assistant to=functions.sum<|channel|>commentary json<|message|>{"terms": [1, 1]}<|call|>'
        '<|start|>functions.sum to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>two<|end|><|start|>user<|message|>And 2 + 2?<|end|>"
        "<|start|>assistant"
    ),
}
GOLDEN["deepseek-r1"] = GOLDEN["deepseek-v3"] + "<think>\n"
# A changed hash is a decision, not noise: the prompt with a tool, whose wording is the library's.
WITH_TOOLS = {
    "qwen3": "b3d4904bc7ca6e05",
    "qwen3-coder": "4dac033f932741e2",
    "qwen3.5": "d8dfaeb850fc8533",
    "llama-3": "b4ac97918ee49550",
    "deepseek-v3": "e5a15fca4bbb7f22",
    "deepseek-r1": "ff9bb9fe32259047",
}


def readable(renderer, ids):
    """Text with DeepSeek's bars and blocks as plain ones."""
    return renderer.decode(ids).replace("\uff5c", "|").replace("\u2581", "_")


def conversation(family):
    if family in SERIAL:
        return [SYSTEM, USER, called([1, 1]), result("2"), said("two", "hm"), MORE]
    return [SYSTEM, USER, called([1, 1], [2, 2]), result("2"), result("4", 1), said("two", "hm"), MORE]


@pytest.mark.parametrize("family", EVERY)
def test_a_conversation_is_written_as_the_family_writes_it(family):
    renderer = family_renderer(family)
    assert readable(renderer, renderer.render(conversation(family), ())) == GOLDEN[family]


@pytest.mark.parametrize("family", EVERY)
def test_every_marker_of_a_prompt_is_one_token(family):
    """Scaffold is encoded with special tokens, and in one piece with the texts next to it, as templates are."""
    renderer = family_renderer(family)
    assert renderer.render(conversation(family), ()) == sampled(
        renderer.decode(renderer.render(conversation(family), ()))
    )


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tools_are_shown_as_the_library_shows_them(family):
    ids = family_renderer(family).render([SYSTEM, USER], (SUM,))
    assert digest_value(ids)[:16] == WITH_TOOLS[family]


# What each family says, sampled: text, and what is read of it.
TWO = (("sum", {"terms": [1, 1]}), ("sum", {"terms": [2, 2]}))
SPOKEN = {
    "qwen3": (f"<think>\nhm\n</think>\n\nso\n{QWEN_CALL([1, 1])}\n{QWEN_CALL([2, 2])}<|im_end|>", "hm", "so", TWO),
    "qwen3-coder": (f"so\n\n{CODER_CALL([1, 1])}\n{CODER_CALL([2, 2])}<|im_end|>", "", "so", TWO),
    "qwen3.5": (f"hm\n</think>\n\nso\n\n{CODER_CALL([1, 1])}\n{CODER_CALL([2, 2])}<|im_end|>", "hm", "so", TWO),
    "llama-3": ('{"name": "sum", "parameters": {"terms": [1, 1]}}<|eot_id|>', "", "", TWO[:1]),
    "deepseek-v3": (
        f"so<|tool_calls_begin|>{BAR_CALL([1, 1])}{BAR_CALL([2, 2])}<|tool_calls_end|><|end_of_sentence|>",
        "",
        "so",
        TWO,
    ),
    "deepseek-r1": (
        f"hm\n</think>\n\nso<|tool_calls_begin|>{BAR_CALL([1, 1])}{BAR_CALL([2, 2])}<|tool_calls_end|>",
        "hm",
        "so",
        TWO,
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.sum "
        '<|constrain|>json<|message|>{"terms": [1, 1]}<|call|>',
        "hm",
        "",
        TWO[:1],
    ),
}


def with_bars(text):
    for name in ("User", "Assistant", "end_of_sentence", "tool_sep"):
        text = text.replace(f"<|{name}|>", f"<\uff5c{name}\uff5c>".replace("_", "\u2581"))
    for name in ("tool_calls", "tool_call", "tool_outputs", "tool_output"):
        for end in ("begin", "end"):
            text = text.replace(f"<|{name}_{end}|>", f"<\uff5c{name}_{end}\uff5c>".replace("_", "\u2581"))
    return text


@pytest.mark.parametrize("family", EVERY)
def test_what_a_family_says_is_read(family):
    text, reasoning, content, calls = SPOKEN[family]
    parsed = family_renderer(family).parse(sampled(with_bars(text)))
    assert (parsed.reasoning, parsed.content, parsed.error) == (reasoning, content, "")
    assert tuple((call.name, call.arguments) for call in parsed.tool_calls) == calls
    assert [call.call_id for call in parsed.tool_calls] == [f"call_{index}" for index in range(len(calls))]


def test_a_text_that_looks_like_a_number_comes_back_as_it_was_written():
    for family in ("qwen3-coder", "qwen3.5"):
        renderer = family_renderer(family)
        for written in ("12345", "007", "1e3", "true", "null", '"x"', "[1, {}]"):
            call = CODER_CALL(1).replace("\n1\n", f"\n{written}\n")
            (read,) = renderer.parse(sampled(f"<think>hm</think>{call}")).tool_calls
            assert read.arguments["terms"] == (json.loads(written) if written.startswith("[") else written)
            turn = Message(Role.ASSISTANT, tool_calls=(read,))
            assert call in renderer.decode(renderer.render([USER, turn, result("2")], ()))


# case X1: cut off in the middle of a call
@pytest.mark.parametrize("family", EVERY)
def test_a_call_that_is_cut_off_is_an_error_or_text(family):
    text = with_bars(SPOKEN[family][0])
    renderer = family_renderer(family)
    for length in range(len(text)):
        parsed = renderer.parse(sampled(text[:length]))
        assert len(parsed.tool_calls) < len(SPOKEN[family][3]) or not parsed.error
        for call in parsed.tool_calls:
            assert (call.name, call.arguments) in SPOKEN[family][3]


# case X2
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "deepseek-r1"])
def test_a_call_inside_an_unclosed_thought_is_no_call(family):
    thought = SPOKEN[family][0].replace("</think>", "")
    parsed = family_renderer(family).parse(sampled(with_bars(thought)))
    assert (parsed.tool_calls, parsed.content, parsed.error) == ((), "", "")
    assert "sum" in parsed.reasoning


ids = st.lists(st.integers(0, family_tokenizer().get_vocab_size() + 3), max_size=30)


@settings(deadline=None, max_examples=150)
@given(ids)
def test_whatever_is_sampled_is_read(token_ids):
    for family in EVERY:
        parsed = family_renderer(family).parse(token_ids)
        assert not (parsed.error and parsed.tool_calls)


texts = st.lists(st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(ALL_MARKERS), max_size=4)


@settings(deadline=None, max_examples=60)
@given(texts.map("".join), texts.map("".join))
def test_any_text_can_be_rendered_and_bridged_and_makes_no_marker(text, other):
    """case T5"""
    for family in EVERY:
        renderer = family_renderer(family)
        markers = marker_ids(renderer)
        counts = []
        for each, again in ((text, other), ("x", "y")):
            messages = [SYSTEM, Message(Role.USER, each), called([1]), result(again)]
            ids = [*renderer.render(messages, ()), *(renderer.bridge([result(each)], True) or [])]
            counts.append([token for token in ids if token in markers])
        assert counts[0] == counts[1], family


# case T17: thoughts stay while tools answer, and go when a user speaks
@pytest.mark.parametrize(
    ("family", "tools_bridge", "users_bridge"),
    [
        ("qwen3", True, False),
        ("qwen3.5", True, False),
        ("qwen3-coder", True, True),
        ("llama-3", True, True),
        ("deepseek-v3", True, True),
        ("deepseek-r1", False, False),
        ("gpt-oss", False, False),
    ],
)
def test_where_thoughts_are_stripped_there_is_no_bridge(family, tools_bridge, users_bridge):
    renderer = family_renderer(family)
    assert (renderer.bridge([result("2")], True) is not None) is tools_bridge
    assert (renderer.bridge([MORE], True) is not None) is users_bridge
    assert renderer.bridge([said("x")], True) is None, "an assistant's turn is sampled, never bridged"


def test_a_turn_that_is_cut_off_in_what_may_be_a_thought_is_not_bridged():
    for family in ("qwen3", "qwen3.5"):
        assert family_renderer(family).bridge([result("2")], False) is None
    for family in ("llama-3", "deepseek-v3", "qwen3-coder"):
        renderer = family_renderer(family)
        closed = renderer.bridge([result("2")], False)
        assert closed[0] in renderer.stop_token_ids
        assert closed[1:] == renderer.bridge([result("2")], True)


def test_settings_of_a_family_reach_its_prompts_and_its_digest():
    silent, loud = family_renderer("qwen3", enable_thinking=False), family_renderer("qwen3")
    assert silent.decode(silent.render([USER], ())).endswith("assistant\n<think>\n\n</think>\n\n")
    assert silent.digest != loud.digest
    assert silent.bridge([MORE], True) is not None, "no thought is stripped where none is made"
    tools_first = family_renderer("llama-3", tools_in_user_message=False)
    assert tools_first.render([USER], (SUM,)) != family_renderer("llama-3").render([USER], (SUM,))


def test_digests_tell_families_apart():
    digests = {family: family_renderer(family).digest for family in EVERY}
    assert len(set(digests.values())) == len(EVERY)


def test_what_a_family_refuses_is_said_when_it_is_asked_for():
    with pytest.raises(ConfigError, match="only supports a single tool call"):
        family_renderer("llama-3").render([USER, called([1], [2])], ())
    with pytest.raises(ConfigError, match="content and thinking beside a call"):
        family_renderer("gpt-oss").render([USER, called([1], content="a", reasoning="b"), result("2")], ())


def test_a_mistake_can_be_answered_in_every_family():
    """case X1: the answer to a call that could not be read answers no call that a template has seen."""
    for family in EVERY:
        renderer = family_renderer(family)
        shown = renderer.decode(renderer.render([USER, said("{"), Message(Role.TOOL, "it is not JSON")], ()))
        assert "it is not JSON" in shown


def test_arguments_and_schemas_keep_their_order():
    tool = ToolSpec("f", "", {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}})
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("f", {"y": 1, "x": 2}, "call_0"),))
    for family in EVERY:
        renderer = family_renderer(family)
        for shown in ([USER], [USER, call, result("2")]):
            text = renderer.decode(renderer.render(shown, (tool,)))
            if not family.startswith("deepseek"):  # whose template shows no tools
                assert '"b"' in text or "<name>b<" in text
                assert max(text.find('"b"'), text.find("<name>b<")) < max(text.find('"a"'), text.find("<name>a<"))
        assert re.search(r"y\b.*x\b", text.split("What is 1 + 1?")[1], re.DOTALL)


def test_families_are_the_librarys():
    assert all(isinstance(family_renderer(family), FamilyRenderer) for family in FAMILIES)

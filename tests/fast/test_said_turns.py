"""The tokens that a policy would have sampled to say a message, in every family."""

import msgspec
import pytest
from rendering_kit import (
    ALL_MARKERS,
    CHATML,
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
    write_folder,
)

from headrace.actors.rendering import load_renderer
from headrace.actors.rendering.said import SaysTurns
from headrace.actors.rendering.template import TemplateRenderer

EVERY = tuple(TOKENS)
THINKING = ("qwen3", "qwen3.5", "deepseek-r1", "gpt-oss")
OPENED = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content.split("</think>")[-1] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}"""


def turns(family):
    """A call, what is answered, and an answer, with thoughts where the family has a place for them."""
    thought = "hm" if family in THINKING else ""
    content = "" if family in ("llama-3", "gpt-oss") else "so"
    return [USER, called([1, 1], content=content, reasoning=thought), result("2"), said("It is two.", thought)]


@pytest.mark.parametrize("family", EVERY)
def test_a_turn_is_said_as_it_is_read(family):
    renderer = family_renderer(family)
    assert isinstance(renderer, SaysTurns)
    messages = [SYSTEM, *turns(family), MORE, said("Four.", "ha" if family in THINKING else "")]
    for index, message in enumerate(messages):
        if message.role == "assistant":
            ids = renderer.said(messages[: index + 1], (SUM,))
            parsed = renderer.parse(ids)
            assert parsed.error == ""
            assert (parsed.content, parsed.reasoning) == (message.content, message.reasoning)
            assert parsed.tool_calls == message.tool_calls
            assert [token in renderer.stop_token_ids for token in ids] == [False] * (len(ids) - 1) + [True]


def test_turns_end_as_they_are_sampled_not_as_history_shows_them():
    renderer = family_renderer("gpt-oss")
    user, call, answer, final = turns("gpt-oss")
    assert renderer.decode(renderer.said([user, call], ())) == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.sum<|channel|>commentary json"
        '<|message|>{"terms": [1, 1]}<|call|>'
    )
    assert renderer.decode(renderer.said([user, call, answer, final], ())) == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is two.<|return|>"
    )


def test_a_thought_that_the_prompt_opens_is_said_where_history_shows_none():
    renderer = family_renderer("deepseek-r1")
    ids = renderer.said([USER, said("two", "hm")], ())
    assert renderer.decode(ids).startswith("hm\n</think>\n\ntwo<")
    assert renderer.decode(renderer.render([USER], ())).endswith("<think>\n")
    assert renderer.said([USER, said("two")], ()) is None, "what would be thought is not known"
    for family in ("deepseek-v3", "qwen3"):
        assert family_renderer(family).said([USER, said("two")], ()) is not None


def test_a_template_that_opens_a_thought_and_shows_none(tmp_path):
    end = {"eos_token": "<|im_end|>"}
    renderer = load_renderer(write_folder(tmp_path, CHATML, OPENED, tokenizer_config=end))
    assert isinstance(renderer, TemplateRenderer)
    ids = renderer.said([USER, said("two", "hm"), MORE, said("four", "ha")], ())
    assert ids == family_tokenizer(CHATML).encode("ha\n</think>\n\nfour<|im_end|>").ids
    assert renderer.said([USER, said("two")], ()) is None


@pytest.mark.parametrize("family", EVERY)
def test_what_is_said_holds_no_marker_but_those_of_the_turn(family):
    """case T5"""
    renderer, markers = family_renderer(family), marker_ids(family_renderer(family))
    counts = []
    for text in ("x", "".join(f"x{marker}y" for marker in ALL_MARKERS)):
        turn = msgspec.structs.replace(turns(family)[3], content=text)
        if turn.reasoning:
            turn = msgspec.structs.replace(turn, reasoning=text)
        counts.append([token for token in renderer.said([USER, turn], ()) if token in markers])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-coder", "llama-3", "deepseek-v3"])
def test_the_prompt_and_what_is_said_are_the_conversation(family):
    """case T3"""
    renderer, messages = family_renderer(family), turns(family)
    whole = renderer.render([*messages, MORE], ())
    ids = [*renderer.render(messages[:3], ()), *renderer.said(messages, ())]
    if family not in THINKING:  # whose thoughts go when the user speaks
        assert whole[: len(ids)] == ids
    assert [*ids] == sampled(renderer.decode(ids))


def test_a_turn_that_no_stop_token_ends_is_not_known(tmp_path):
    files = {"tokenizer_config": {"eos_token": "<|endoftext|>"}}
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    assert load_renderer(write_folder(tmp_path, CHATML, template, **files)).said([USER, said("two")], ()) is None

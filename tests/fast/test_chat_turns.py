"""Turns of chats: what a family of models samples to say them, and what of them is lost on the way."""

import pytest
from rendering_kit import SUM, SYSTEM, called, family_renderer, result
from rendering_kit import USER as QUESTION
from rendering_kit import said as rendered_said

from headrace.actors.context import Context
from headrace.actors.demonstrations.loss import what_is_lost
from headrace.actors.demonstrations.traces import chat_traces
from headrace.platform.contracts import ParsedMessage
from headrace.platform.errors import ConfigError
from headrace.platform.records import Message, Role, ToolCall, i32


class TestWhatIsLost:
    CALL = Message(Role.ASSISTANT, "hello", "hm", (ToolCall("f", {"n": 3, "on": True, "text": "3", "list": [1, "a"]}),))

    def read(self, content="hello", reasoning="hm", **arguments) -> ParsedMessage:
        given = {"n": 3, "on": True, "text": "3", "list": [1, "a"], **arguments}
        calls = (ToolCall("f", {key: value for key, value in given.items() if value is not ...}),)
        return ParsedMessage(content, reasoning, calls)

    @pytest.mark.parametrize(
        "same", [{}, {"content": " hello\n"}, {"reasoning": "\nhm"}, {"n": "3", "on": "True"}, {"on": "true"}]
    )
    def test_space_around_and_scalars_as_text_are_no_loss(self, same):
        assert what_is_lost(self.CALL, self.read(**same)) == ""

    @pytest.mark.parametrize(
        ("other", "named"),
        [
            ({"n": ...}, "the argument 'n' of f is lost"),
            ({"n": 4}, "the argument 'n' of f, '3', reads back as '4'"),
            ({"on": 1}, "the argument 'on' of f, 'true', reads back as '1'"),
            ({"text": 3}, "the argument 'text' of f"),
            ({"list": [1]}, "the argument 'list' of f"),
            ({"extra": 1}, "an argument 'extra' that it was not given"),
            ({"content": "hullo"}, "its content 'hello' reads back as 'hullo'"),
            ({"content": ""}, "leaves its content out"),
            ({"content": "hello hello"}, "reads back as 'hello hello'"),
            ({"reasoning": "h"}, "its reasoning_content 'hm' reads back as 'h'"),
            ({"reasoning": ""}, "leaves its reasoning_content out"),
        ],
    )
    def test_everything_else_is_named(self, other, named):
        assert named in what_is_lost(self.CALL, self.read(**other))

    def test_what_a_tokenizer_normalises_is_no_loss(self):
        assert what_is_lost(Message(Role.ASSISTANT, "\ufb01ne"), ParsedMessage("fine")) == ""


FAMILIES = ("qwen3", "qwen3-coder", "qwen3.5", "llama-3", "deepseek-v3")


@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_are_shown_what_they_sample(family):
    """Every turn of the assistant reads back as it was meant, out of the tokens that are imitated."""
    renderer = family_renderer(family)
    thinks = "hm" if family == "qwen3.5" else ""  # its prompts open a thought
    messages = [SYSTEM, QUESTION, called([1, 1], reasoning=thinks), result("2"), rendered_said("two", thinks)]
    ((ids, mask),) = chat_traces(renderer, messages, [SUM], [True] * len(messages))
    ends = [
        i for i, (token, mark) in enumerate(zip(ids, mask, strict=True)) if mark and token in renderer.stop_token_ids
    ]
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    call, answer = (ids[start : end + 1] for start, end in zip(starts, ends, strict=True))
    context = Context(renderer, [SUM])  # case T3: the same turns in an episode
    context.open(messages[:2])
    context.said(messages[2], i32(call))
    context.observed(messages[3:4], True, 2)
    context.said(messages[4], i32(answer))
    assert (context.token_ids().tolist(), context.segment) == (ids, 0)
    first, second = renderer.parse(call), renderer.parse(answer)
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("sum", {"terms": [1, 1]})]
    assert (second.content.strip(), second.reasoning.strip()) == ("two", thinks)


@pytest.mark.parametrize("family", ["deepseek-r1", "gpt-oss"])
def test_turns_that_history_shows_otherwise_are_imitated_as_they_are_sampled(family):
    """One ends a turn with another token once it is history, the other shows no thoughts, which its prompts open."""
    renderer = family_renderer(family)
    messages = [SYSTEM, QUESTION, called([1, 1], reasoning="hm"), result("2"), rendered_said("two", "so")]
    call, answer = chat_traces(renderer, messages, [SUM], [True] * len(messages))
    context = Context(renderer, [SUM])
    context.open(messages[:2])
    read = []
    for (ids, mask), opened in ((call, context.token_ids().tolist()), (answer, renderer.render(messages[:4], [SUM]))):
        said_ids = [token for token, mark in zip(ids, mask, strict=True) if mark]
        assert ids == [*opened, *said_ids] and said_ids[-1] in renderer.stop_token_ids
        read.append(renderer.parse(said_ids))
    assert read[0].tool_calls[0].arguments == {"terms": [1, 1]} and read[0].reasoning.strip() == "hm"
    assert (read[1].content.strip(), read[1].reasoning.strip()) == ("two", "so")


def test_a_prompt_that_opens_a_thought_needs_one():
    with pytest.raises(ConfigError, match=r"message 1: .*give reasoning_content; else imitate stored episodes"):
        chat_traces(family_renderer("deepseek-r1"), [QUESTION, rendered_said("two")], [], [False, True])

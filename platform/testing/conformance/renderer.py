"""What every `Renderer` must do. Run each function of `RENDERER_SUITE` with a context of your own."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.platform.contracts import Renderer
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role

_RANDOM_SEQUENCES = 500


@dataclass(kw_only=True, slots=True, frozen=True)
class RendererContext:
    """What the suite runs against.

    `messages` open a conversation and `reply` is what an assistant could say next, in words that the vocabulary has;
    `calling` is one with a tool call, and `answer` what the world says then. `thinking`, where the model thinks, is a
    turn with a thought; `parallel`, where it calls tools in parallel, one with two calls, which `answers` answer.
    `special_ids` are the tokens that no text may become, among them the stop tokens, and `hostile` is text that tries.
    Ids lie below `vocabulary`.
    """

    make: Callable[[], Renderer]
    messages: Sequence[Message]
    reply: Message
    calling: Message
    answer: Message
    special_ids: Sequence[int]
    hostile: str
    vocabulary: int
    tools: Sequence[ToolSpec] = field(default=())
    thinking: Message | None = None
    parallel: Message | None = None
    answers: Sequence[Message] = ()

    def turns(self) -> list[tuple[Message, list[Message]]]:
        """What an assistant could say, each with what follows: results of calls, or the last question again."""
        question = [self.messages[-1]]
        turns = [(self.reply, question), (self.calling, [self.answer])]
        if self.thinking is not None:
            turns.append((self.thinking, [self.answer] if self.thinking.tool_calls else question))
        if self.parallel is not None:
            turns.append((self.parallel, list(self.answers)))
        return turns

    def header(self, renderer: Renderer) -> list[int]:
        """What lets the assistant speak: the ending of prompts whose last messages differ in all but their role."""
        other_answer = msgspec.structs.replace(self.answer, content=self.messages[-1].content)
        one = renderer.render([*self.messages, self.calling, self.answer], self.tools)
        other = renderer.render([*self.messages, self.calling, self.answer, self.calling, other_answer], self.tools)
        shared = 0
        while shared < min(len(one), len(other)) and one[-1 - shared] == other[-1 - shared]:
            shared += 1
        return one[len(one) - shared :]


async def render_is_repeatable(context: RendererContext) -> None:
    """Plain ints, the same every time and from every instance."""
    renderer, twin = context.make(), context.make()
    ids = renderer.render(context.messages, context.tools)
    assert all(type(token) is int and 0 <= token < context.vocabulary for token in ids), f"not token ids: {ids}"
    assert ids == renderer.render(context.messages, context.tools) == twin.render(context.messages, context.tools), (
        "the same messages are rendered differently a second time"
    )
    assert renderer.digest and renderer.digest == twin.digest, "a digest names the template, the same each time"
    assert renderer.stop_token_ids, "without a stop token no sampled turn could end"


async def prompts_end_with_the_header(context: RendererContext) -> None:
    """After a prompt the assistant speaks, whatever came before."""
    renderer = context.make()
    header = context.header(renderer)
    assert header, "prompts share no ending, so no header lets the assistant speak"
    bridged = renderer.bridge([context.answer], True)
    if bridged is not None:
        assert bridged[-len(header) :] == header, f"a bridge ends with {bridged[-len(header) :]}, not {header}"


async def bridge_continues_the_render(context: RendererContext) -> None:
    """Prompt, sampled tokens and bridge are exactly the full render, or there is no bridge (cases T3, T4, T17)."""
    renderer = context.make()
    for spoken, following in context.turns():
        prompt = renderer.render(context.messages, context.tools)
        full = renderer.render([*context.messages, spoken, *following], context.tools)
        bridged = renderer.bridge(following, True)
        if bridged is not None:
            sampled = _sampled(renderer, spoken, prompt, full, bridged)
            assert sampled and sampled[-1] in renderer.stop_token_ids, (
                f"between prompt and bridge lies {sampled}, which does not end with a stop token"
            )
            cut = renderer.bridge(following, False)
            if cut is not None:
                assert prompt + sampled[:-1] + cut == full, (
                    "the bridge after a cut turn does not close it as the render does"
                )


async def bridges_add_up_to_the_render(context: RendererContext) -> None:
    """A conversation of several turns, each bridged onto the last, is the full render of it (case T3)."""
    renderer = context.make()
    messages = list(context.messages)
    grown = renderer.render(messages, context.tools)
    for spoken, following in [*context.turns(), *context.turns()]:
        messages += [spoken, *following]
        full = renderer.render(messages, context.tools)
        bridged = renderer.bridge(following, True)
        if bridged is None:
            grown = full
            continue
        grown = grown + _sampled(renderer, spoken, grown, full, bridged) + bridged
        assert grown == full, f"after {len(messages)} messages the bridged context is not the render"


async def sampled_tokens_are_read_back(context: RendererContext) -> None:
    """What a policy says is parsed into the message that would be rendered so."""
    renderer = context.make()
    for spoken, following in context.turns():
        prompt = renderer.render(context.messages, context.tools)
        bridged = renderer.bridge(following, True)
        if bridged is None:
            continue
        full = renderer.render([*context.messages, spoken, *following], context.tools)
        parsed = renderer.parse(_sampled(renderer, spoken, prompt, full, bridged))
        assert not parsed.error, f"{spoken} is not read back: {parsed.error}"
        assert parsed.content.strip() == spoken.content.strip(), f"{spoken.content!r} is read as {parsed.content!r}"
        assert parsed.reasoning == spoken.reasoning, f"{spoken.reasoning!r} is read as {parsed.reasoning!r}"
        calls = [(call.name, call.arguments) for call in parsed.tool_calls]
        assert calls == [(call.name, call.arguments) for call in spoken.tool_calls], f"{spoken} is read as {calls}"


def _sampled(renderer: Renderer, spoken: Message, prompt: list[int], full: list[int], bridged: list[int]) -> list[int]:
    """What a policy samples to say `spoken`: what lies in the full render between prompt and bridge."""
    assert full[: len(prompt)] == prompt, "a longer conversation does not begin with the shorter one's prompt"
    assert full[-len(bridged) :] == bridged, (
        f"the render of {spoken} ends otherwise than its bridge {renderer.decode(bridged)!r}"
    )
    return full[len(prompt) : len(full) - len(bridged)]


async def no_special_token_comes_out_of_text(context: RendererContext) -> None:
    """A tool's output with role markers is plain text (case T5)."""
    renderer = context.make()
    hostile = Message(context.answer.role, context.hostile, tool_call_id=context.answer.tool_call_id)
    for what, plain_ids, hostile_ids in (
        ("render", *(renderer.render([*context.messages, context.calling, m], ()) for m in (context.answer, hostile))),
        ("bridge", *(renderer.bridge([m], True) or [] for m in (context.answer, hostile))),
        ("user", *(renderer.render([Message(Role.USER, m.content)], ()) for m in (context.answer, hostile))),
    ):
        for special in {*context.special_ids, *renderer.stop_token_ids}:
            found, wanted = hostile_ids.count(special), plain_ids.count(special)
            assert found == wanted, (
                f"{what}: the text {context.hostile!r} made special token {special} ({renderer.decode([special])!r})"
                f" appear {found} times instead of {wanted}"
            )


async def no_special_token_comes_out_of_what_is_rendered_again(context: RendererContext) -> None:
    """Nor does it where a model repeats such a text, or a tool's schema holds it (case T5)."""
    renderer = context.make()

    def prompts(text: str) -> dict[str, list[int]]:
        call = ToolCall("f", {"k": [text, {"d": text}]})
        tool = ToolSpec("f", text, {"properties": {"k": {"description": text, "enum": [text]}}})
        return {
            what: renderer.render([*context.messages, *said], tools)
            for what, said, tools in (
                ("content", [Message(Role.ASSISTANT, text), context.messages[-1]], ()),
                ("reasoning", [Message(Role.ASSISTANT, "", text, context.calling.tool_calls), context.answer], ()),
                ("arguments", [Message(Role.ASSISTANT, tool_calls=(call,)), context.answer], ()),
                ("names", [Message(Role.ASSISTANT, tool_calls=(ToolCall(text, {text: 1}),)), context.answer], ()),
                ("schema", [], [tool]),
                ("schema names", [], [ToolSpec(text, "", {"properties": {text: {"type": "string", text: 1}}})]),
            )
        }

    plain, hostile = prompts("x"), prompts(context.hostile)
    special_ids = {*context.special_ids, *renderer.stop_token_ids}
    for what, ids in hostile.items():
        found, wanted = ([t for t in each if t in special_ids] for each in (ids, plain[what]))
        assert found == wanted, (
            f"{what}: the text {context.hostile!r} changed the special tokens of a prompt to {renderer.decode(found)!r}"
        )


async def parse_never_raises(context: RendererContext) -> None:
    """Whatever a policy samples is read, or is an error that helps the model (case X1)."""
    renderer = context.make()
    chance = random.Random(0)
    assert renderer.parse([]).tool_calls == (), "nothing was said, but a call was read"
    pool = [*range(context.vocabulary), *[special for special in context.special_ids for _ in range(20)]]
    for _ in range(_RANDOM_SEQUENCES):
        ids = [chance.choice(pool) for _ in range(chance.randrange(32))]
        try:
            parsed = renderer.parse(ids)
            text = renderer.decode(ids)
        except Exception as error:
            raise AssertionError(f"reading {ids} raised {error!r}") from error
        assert isinstance(parsed.content, str) and isinstance(text, str), f"{ids} is not read as text"
        text.encode()


async def parse_is_the_same_everywhere(context: RendererContext) -> None:
    """Training and evaluation read alike (case X2)."""
    one, other = context.make(), context.make()
    chance = random.Random(1)
    for _ in range(_RANDOM_SEQUENCES // 10):
        ids = [chance.randrange(context.vocabulary) for _ in range(16)]
        assert one.parse(ids) == other.parse(ids), f"two renderers read {ids} differently"


RENDERER_SUITE: dict[str, Callable[[RendererContext], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        render_is_repeatable,
        prompts_end_with_the_header,
        bridge_continues_the_render,
        bridges_add_up_to_the_render,
        sampled_tokens_are_read_back,
        no_special_token_comes_out_of_text,
        no_special_token_comes_out_of_what_is_rendered_again,
        parse_never_raises,
        parse_is_the_same_everywhere,
    )
}

"""What every `Renderer` must do. Run each function of `RENDERER_SUITE` with a context of your own."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.platform.contracts import Renderer
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.status import Role

_RANDOM_SEQUENCES = 500


@dataclass(kw_only=True, slots=True, frozen=True)
class RendererContext:
    """What the suite runs against.

    `messages` open a conversation and `reply` is what an assistant could say next, in words that the vocabulary has;
    `calling` is one with a tool call. `special_ids` are the tokens that no text may become, among them the stop
    tokens, and `hostile` is text that tries. Ids lie below `vocabulary`.
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

    def header(self, renderer: Renderer) -> list[int]:
        """What lets the assistant speak: the ending that prompts of different messages share."""
        one = renderer.render(self.messages, self.tools)
        other = renderer.render([*self.messages, self.reply, self.answer], self.tools)
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
    """Prompt, sampled tokens and bridge are exactly the full render, or there is no bridge (case T3)."""
    renderer = context.make()
    for spoken in (context.reply, context.calling):
        prompt = renderer.render(context.messages, context.tools)
        full = renderer.render([*context.messages, spoken, context.answer], context.tools)
        bridged = renderer.bridge([context.answer], True)
        if bridged is None:
            continue
        assert full[: len(prompt)] == prompt, "a longer conversation does not begin with the shorter one's prompt"
        assert full[-len(bridged) :] == bridged, f"the render of {spoken} ends otherwise than its bridge"
        sampled = full[len(prompt) : len(full) - len(bridged)]
        assert sampled and sampled[-1] in renderer.stop_token_ids, (
            f"between prompt and bridge lies {sampled}, which does not end with a stop token"
        )
        cut = renderer.bridge([context.answer], False)
        if cut is not None:
            assert prompt + sampled[:-1] + cut == full, (
                "the bridge after a cut turn does not close it as the render does"
            )


async def sampled_tokens_are_read_back(context: RendererContext) -> None:
    """What a policy says is parsed into the message that would be rendered so."""
    renderer = context.make()
    for spoken in (context.reply, context.calling):
        prompt = renderer.render(context.messages, context.tools)
        bridged = renderer.bridge([context.answer], True)
        if bridged is None:
            continue
        full = renderer.render([*context.messages, spoken, context.answer], context.tools)
        parsed = renderer.parse(full[len(prompt) : len(full) - len(bridged)])
        assert not parsed.error, f"{spoken} is not read back: {parsed.error}"
        assert parsed.content.strip() == spoken.content.strip(), f"{spoken.content!r} is read as {parsed.content!r}"
        calls = [(call.name, call.arguments) for call in parsed.tool_calls]
        assert calls == [(call.name, call.arguments) for call in spoken.tool_calls], f"{spoken} is read as {calls}"


async def no_special_token_comes_out_of_text(context: RendererContext) -> None:
    """A tool's output with role markers is plain text (case T5)."""
    renderer = context.make()
    hostile = Message(context.answer.role, context.hostile, tool_call_id=context.answer.tool_call_id)
    for what, plain_ids, hostile_ids in (
        ("render", *(renderer.render([*context.messages, m], ()) for m in (context.answer, hostile))),
        ("bridge", *(renderer.bridge([m], True) or [] for m in (context.answer, hostile))),
        ("user", *(renderer.render([Message(Role.USER, m.content)], ()) for m in (context.answer, hostile))),
    ):
        for special in {*context.special_ids, *renderer.stop_token_ids}:
            found, wanted = hostile_ids.count(special), plain_ids.count(special)
            assert found == wanted, (
                f"{what}: the text {context.hostile!r} made special token {special} ({renderer.decode([special])!r})"
                f" appear {found} times instead of {wanted}"
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
        sampled_tokens_are_read_back,
        no_special_token_comes_out_of_text,
        parse_never_raises,
        parse_is_the_same_everywhere,
    )
}

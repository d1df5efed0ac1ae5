"""Chats as traces: the tokens that a policy would have met and sampled, had it said what the assistant says.

A trace is made as an episode is: the opening messages and tools are rendered, then each turn of the assistant is
appended as it would have been sampled, its stop token included, then the bridge over what the world answered. Where
the template allows no bridge (it strips earlier thinking, case T17), another trace begins with a full render, as an
episode would open a segment. The mask is 1 on what the assistant says and 0 on roles, scaffold and all other messages
(case T7); what the renderer encodes as plain text stays plain text (case T5).

What the assistant says is what the renderer says that the policy would have sampled (`SaysTurns`), for a renderer that
does not know it the difference between two full renders. It is read back before it is taken, by `loss.py`: a template
that drops arguments or thoughts, or a tokenizer without the words, would teach something else.
"""

from collections.abc import Iterator, Sequence

import msgspec

from headrace.actors.demonstrations.loss import what_is_lost
from headrace.actors.rendering.said import SaysTurns
from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message, ToolSpec
from headrace.platform.records.status import Role

Trace = tuple[list[int], list[int]]
"""Token ids and action mask, both of length L; 1 marks what is imitated."""


def chat_traces(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec], trained: Sequence[bool]
) -> list[Trace]:
    """The traces of one conversation, usually one. Each trains only the turns that it does not show as history.

    Args:
        renderer: that of the model which will imitate.
        messages: begin with the system or the user; what follows the last turn of the assistant is not looked at.
        tools: what is on offer in the whole conversation.
        trained: one entry a message; turns of the assistant that are not trained are shown with mask 0. A trace
            without any trained turn is left out.

    Raises:
        ConfigError: the template cannot express the conversation; says which message and why.
    """
    turns = [index for index, message in enumerate(messages) if message.role is Role.ASSISTANT]
    shown = list(messages[: turns[0]])
    token_ids = renderer.render(shown, tools)
    mask = [0] * len(token_ids)
    traces: list[Trace] = []
    for turn, following_turn in zip(turns, [*turns[1:], None], strict=True):
        message, said = _sampled(renderer, shown, messages[turn], tools, token_ids, turn)
        token_ids, mask = token_ids + said, mask + [int(trained[turn])] * len(said)
        if following_turn is None:
            break
        answers = messages[turn + 1 : following_turn]
        shown += [message, *answers]
        bridge = renderer.bridge(answers, ended=True)
        if bridge is not None:
            token_ids, mask = token_ids + bridge, mask + [0] * len(bridge)
        else:
            traces.append((token_ids, mask))
            token_ids = renderer.render(shown, tools)
            mask = [0] * len(token_ids)
    return [(ids, marks) for ids, marks in (*traces, (token_ids, mask)) if any(marks)]


def _sampled(
    renderer: Renderer,
    shown: Sequence[Message],
    message: Message,
    tools: Sequence[ToolSpec],
    context: list[int],
    position: int,
) -> tuple[Message, list[int]]:
    """The turn as the template takes it, and the tokens of it that a policy would have sampled after `context`."""
    lost = ""
    for reading in _readings(message):
        said = renderer.said([*shown, reading], tools) if isinstance(renderer, SaysTurns) else None
        if said is None:
            said = _difference(renderer, shown, reading, tools, context, position)
        lost = what_is_lost(reading, renderer.parse(said))
        if not lost:
            return reading, said
    raise ConfigError(f"message {position}: {lost}")


def _difference(
    renderer: Renderer,
    shown: Sequence[Message],
    message: Message,
    tools: Sequence[ToolSpec],
    context: list[int],
    position: int,
) -> list[int]:
    """What a full render writes after `shown`, through the token that ends the turn."""
    whole = renderer.render([*shown, message], tools)
    # Where the context is the full render, as nearly always, the second render need not be made.
    before = context if whole[: len(context)] == context else renderer.render(shown, tools)
    if whole[: len(before)] != before:
        raise ConfigError(
            f"message {position}: the template shows what came before differently once this message is there, so what"
            " the model would have sampled is unclear. Where prompts open a thought, give reasoning_content; else"
            " imitate stored episodes (headrace sft RUN), which hold what was sampled"
        )
    rest = whole[len(before) :]
    end = next((index for index, token in enumerate(rest) if token in renderer.stop_token_ids), None)
    if end is None:
        raise ConfigError(
            f"message {position}: the template does not end it with one of the model's stop tokens, so what the model"
            " would have sampled is unclear; stored episodes (headrace sft RUN) hold what was sampled"
        )
    return rest[: end + 1]


def _readings(message: Message) -> Iterator[Message]:
    """The message with a thought that is written into its content set apart, as it would be sampled; then as it is."""
    head, closed, tail = message.content.partition("</think>")
    if closed and not message.reasoning and head.lstrip().startswith("<think>"):
        thought = head.lstrip().removeprefix("<think>").strip()
        yield msgspec.structs.replace(message, reasoning=thought, content=tail.lstrip())
    yield message

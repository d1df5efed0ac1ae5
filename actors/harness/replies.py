"""From sampled tokens to what a client is told."""

from collections.abc import Sequence

import msgspec

from headrace.platform.contracts import Answered, Asked, ParsedMessage, Renderer
from headrace.platform.records.arrays import I32
from headrace.platform.records.generation import Generation
from headrace.platform.records.message import Message
from headrace.platform.records.status import FinishReason, Role


def read(renderer: Renderer, token_ids: Sequence[int], *, has_tools: bool, is_text: bool) -> ParsedMessage:
    """What sampled tokens say. Where the client offered no tool, or asked for text, nothing is a call; a call that
    cannot be read is told as the text that it is, and stays an `error`."""
    ended = bool(token_ids) and token_ids[-1] in renderer.stop_token_ids
    text = renderer.decode(token_ids[:-1] if ended else token_ids)
    if is_text:
        return ParsedMessage(text)
    said = renderer.parse(token_ids)
    if said.error:
        return ParsedMessage(text, error=said.error if has_tools else "")
    return said if has_tools or not said.tool_calls else ParsedMessage(text)


def answered(
    asked: Asked, renderer: Renderer, prompt: I32, generation: Generation, said: ParsedMessage, serial: int
) -> Answered:
    """What a client is told of a generation; `serial` numbers the turn, for the ids of its calls."""
    content, is_cut = _cut(said.content, asked.sampling.stop)
    # Nine letters and digits: some chat templates take no other ids, and not the same one twice. What is behind a stop
    # text is not told, so no call is either.
    calls = tuple(
        msgspec.structs.replace(call, call_id=f"c{serial % 10**6:06d}{index % 100:02d}")
        for index, call in enumerate(() if is_cut else said.tool_calls)
    )
    ids = generation.token_ids
    reason = "length" if generation.finish_reason is not FinishReason.STOP and not is_cut else "stop"
    return Answered(
        message=Message(Role.ASSISTANT, content, said.reasoning, calls),
        prompt_token_ids=prompt,
        token_ids=ids,
        logprobs=generation.logprobs,
        texts=tuple(renderer.decode([token_id]) for token_id in ids.tolist()),
        finish_reason="tool_calls" if calls else reason,
        version=generation.version_spans[-1].version,
    )


def _cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the first of `stops`, and whether there was one."""
    end = min((at for at in (text.find(stop) for stop in stops if stop) if at >= 0), default=None)
    return (text, False) if end is None else (text[:end], True)

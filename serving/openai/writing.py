"""From answers to OpenAI's JSON, whole or as a stream of events.

A stream has the form of OpenAI's and not its pace: a turn is told when it has been sampled.
"""

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

from headrace.platform.contracts import Answered
from headrace.serving.openai.schemas import ChatRequest, TextRequest

Json = dict[str, Any]
DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"


def chat_answer(request: ChatRequest, answer: Answered) -> Json:
    """The body of an answered chat request."""
    choice: Json = {"index": 0, "message": _message(answer), "finish_reason": answer.finish_reason}
    choice["logprobs"] = _chat_logprobs(answer) if request.logprobs else None
    body = {**_head("chatcmpl", "chat.completion", answer), "choices": [choice], "usage": _usage(answer)}
    if request.return_token_ids:
        body["prompt_token_ids"] = answer.prompt_token_ids.tolist()
        choice["token_ids"] = answer.token_ids.tolist()
    return body


def text_answer(request: TextRequest, answer: Answered) -> Json:
    """The body of an answered request for a text."""
    choice = _text_choice(request, answer)
    return {**_head("cmpl", "text_completion", answer), "choices": [choice], "usage": _usage(answer)}


def chat_events(request: ChatRequest, answer: Answered) -> Iterator[str]:
    """The same as events."""
    head = _head("chatcmpl", "chat.completion.chunk", answer)

    def event(delta: Json, finish_reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
        return _event({**head, "choices": [choice], **begins})

    begins: Json = {"prompt_token_ids": answer.prompt_token_ids.tolist()} if request.return_token_ids else {}
    yield event({"role": "assistant", "content": ""})
    begins = {}
    said = answer.message
    more: Json = {"token_ids": answer.token_ids.tolist()} if request.return_token_ids else {}
    if request.logprobs:
        more["logprobs"] = _chat_logprobs(answer)
    if said.reasoning:
        yield event({"reasoning_content": said.reasoning})
    if said.content or more:
        yield event({"content": said.content}, **more)
    for index, call in enumerate(_calls(answer)):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, answer.finish_reason)
    if request.stream_options and request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield DONE


def text_events(request: TextRequest, answer: Answered) -> Iterator[str]:
    """The same as events."""
    head = _head("cmpl", "text_completion", answer)
    yield _event({**head, "choices": [_text_choice(request, answer)]})
    if request.stream_options and request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answer)})
    yield DONE


def error_event(body: Json) -> str:
    """An error that came after the stream had begun."""
    return _event(body) + DONE


def _event(body: Json) -> str:
    """In ASCII: many clients take U+2028 and U+0085, which JSON leaves as they are, for the end of a line."""
    return f"data: {json.dumps(body)}\n\n"


def _head(prefix: str, kind: str, answer: Answered) -> Json:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": str(answer.version),
        "system_fingerprint": None,
    }


def _message(answer: Answered) -> Json:
    said = answer.message
    message: Json = {"role": "assistant", "content": said.content or (None if said.tool_calls else "")}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = _calls(answer)
    return message


def _calls(answer: Answered) -> list[Json]:
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in answer.message.tool_calls
    ]


def _chat_logprobs(answer: Answered) -> Json:
    pairs = zip(answer.texts, answer.logprobs.tolist(), strict=True)
    content = [
        {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []} for text, logprob in pairs
    ]
    return {"content": content, "refusal": None}


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token, None where it holds a part of a character, which text cannot show."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())


def _text_choice(request: TextRequest, answer: Answered) -> Json:
    reason = "stop" if answer.finish_reason == "tool_calls" else answer.finish_reason
    choice: Json = {"index": 0, "text": answer.message.content, "finish_reason": reason, "logprobs": None}
    if request.logprobs is not None:
        offsets = [0]
        for text in answer.texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        choice["logprobs"] = {
            "tokens": list(answer.texts),
            "token_logprobs": answer.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets[: len(answer.texts)],
        }
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids.tolist()
        choice["prompt_token_ids"] = answer.prompt_token_ids.tolist()
    return choice


def _usage(answer: Answered) -> Json:
    prompt, sampled = len(answer.prompt_token_ids), len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

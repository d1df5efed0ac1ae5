"""What clients may send, as OpenAI's API has it. What is not known is not looked at, but for settings that would change
the answer: those are refused, by name."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

Tokens = Annotated[int, Field(ge=1)]
T = TypeVar("T")
_OTHERS = "the logprobs of sampled tokens are known, those of others are not"


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class FunctionCall(_Lenient):
    """A call in an assistant's message; `arguments` is a JSON object as text."""

    name: str
    arguments: str = "{}"


class ToolCallPart(_Lenient):
    """One call of an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(_Lenient):
    """A piece of a message's content; pictures and sound are refused."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class ChatMessage(_Lenient):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    tool_call_id: str | None = None


class Function(_Lenient):
    """A tool on offer."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Lenient):
    """A tool on offer."""

    type: Literal["function"]
    function: Function


class StreamOptions(_Lenient):
    """What else a stream has."""

    include_usage: bool = False


class _Request(_Lenient):
    """What both kinds of request share."""

    model: str = ""
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    seed: int | None = None
    max_tokens: Tokens | None = None
    return_token_ids: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError("one choice is sampled for each request; send as many requests as you want choices")
        return value

    @field_validator("presence_penalty", "frequency_penalty", "min_p")
    @classmethod
    def _no_penalty(cls, value: float | None) -> float | None:
        return _only(value, (None, 0))

    @field_validator("repetition_penalty")
    @classmethod
    def _no_repetition_penalty(cls, value: float | None) -> float | None:
        return _only(value, (None, 1))

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        return _only(value, (None, {}))

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(_Request):
    """`/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @field_validator("tool_choice")
    @classmethod
    def _free_choice(cls, value: Any) -> Any:
        if value not in (None, "auto", "none"):
            raise ValueError("only auto and none are served: the policy decides what it calls")
        return value

    @field_validator("functions", "function_call")
    @classmethod
    def _as_tools(cls, value: Any) -> Any:
        if value not in (None, [], "auto", "none"):
            raise ValueError("is not served any more, by OpenAI neither; offer tools")
        return value

    @field_validator("response_format")
    @classmethod
    def _free_form(cls, value: Any) -> Any:
        if value is not None and value != {"type": "text"}:
            raise ValueError("only text is served: a grammar changes the distribution that is sampled from")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _no_others(cls, value: int | None) -> int | None:
        if value:
            raise ValueError(f"{_OTHERS}; leave it out or say 0")
        return value


class TextRequest(_Request):
    """`/v1/completions`: `prompt` is a text, or token ids, which are taken as they are."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0)

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) > 1:
                raise ValueError("one prompt is answered by each request")
            value = value[0]
        if isinstance(value, list) and any(token_id < 0 for token_id in value):
            raise ValueError("token ids are not negative")
        return value

    @field_validator("logprobs")
    @classmethod
    def _of_sampled(cls, value: int | None) -> int | None:
        if value is not None and value > 1:
            raise ValueError(f"{_OTHERS}; say 0 or 1")
        return value

    @field_validator("echo", "suffix")
    @classmethod
    def _no_frills(cls, value: Any) -> Any:
        return _only(value, (None, False, ""))

    @field_validator("best_of")
    @classmethod
    def _the_only_one(cls, value: int | None) -> int | None:
        return _only(value, (None, 1))


class OpenRequest(_Lenient):
    """`POST /episodes`."""

    wait_s: float = Field(0.0, ge=0, le=300)


class AbandonRequest(_Lenient):
    """`DELETE /episodes/{id}`."""

    reason: str = Field("", max_length=500)


def _only(value: T, allowed: tuple[Any, ...]) -> T:
    """`value` where it is a setting that changes nothing. Raises ValueError for any other."""
    if value not in allowed:
        raise ValueError("is not served: it changes the distribution that is sampled from, or the answer")
    return value

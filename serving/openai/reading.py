"""From what clients send to what is asked of `Conversations`."""

from headrace.platform.contracts import Asked, AskedSampling, RefusalCode
from headrace.platform.errors import DoorRefused
from headrace.platform.records.message import Message, ToolCall, ToolSpec
from headrace.platform.records.status import Role
from headrace.serving.openai.bodies import strict_json
from headrace.serving.openai.schemas import ChatMessage, ChatRequest, TextRequest, Tool, ToolCallPart


def asked_chat(request: ChatRequest, retry_key: str, is_retry: bool) -> Asked:
    """A chat request. Raises DoorRefused, and names the field."""
    return Asked(
        messages=tuple(_message(each, f"messages.{index}") for index, each in enumerate(request.messages)),
        tools=() if request.tool_choice == "none" else tuple(_tool(each) for each in request.tools or ()),
        sampling=_sampling(request, request.max_completion_tokens or request.max_tokens),
        model=request.model,
        retry_key=retry_key,
        is_retry=is_retry,
    )


def asked_text(request: TextRequest, retry_key: str, is_retry: bool) -> Asked:
    """A request for a text. Token ids are taken as they are."""
    prompt = request.prompt
    return Asked(
        prompt=prompt if isinstance(prompt, str) else tuple(int(each) for each in prompt),  # type: ignore[arg-type]
        sampling=_sampling(request, request.max_tokens or 16),  # OpenAI's default
        model=request.model,
        retry_key=retry_key,
        is_retry=is_retry,
    )


def _sampling(request: ChatRequest | TextRequest, max_tokens: int | None) -> AskedSampling:
    return AskedSampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=None if request.seed is None else request.seed & (1 << 63) - 1,
        stop=request.stops,
    )


def _message(message: ChatMessage, where: str) -> Message:
    role = Role.SYSTEM if message.role == "developer" else Role(message.role)
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)
    calls = [_call(each, f"{where}.tool_calls.{index}") for index, each in enumerate(message.tool_calls or ())]
    return Message(role, text, message.reasoning_content or "", tuple(calls), message.tool_call_id or "")


def _call(part: ToolCallPart, where: str) -> ToolCall:
    try:
        arguments = strict_json(part.function.arguments or "{}")
    except ValueError as error:
        told = f"the arguments are no JSON: {error}"
        raise DoorRefused(told, RefusalCode.INVALID, f"{where}.function.arguments") from None
    if not isinstance(arguments, dict):
        told = "the arguments must be a JSON object"
        raise DoorRefused(told, RefusalCode.INVALID, f"{where}.function.arguments")
    return ToolCall(part.function.name, arguments, part.id)


def _tool(tool: Tool) -> ToolSpec:
    function = tool.function
    return ToolSpec(function.name, function.description or "", function.parameters or {})

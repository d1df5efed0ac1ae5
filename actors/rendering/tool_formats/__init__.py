"""How families of models write tool calls as text: one class a format, `build_tool_format` by name.

A format reads text, not tokens: a family's calls are read alike wherever it is rendered and whatever its vocabulary
makes of a tag. It knows no tools, so arguments are what is written; a world checks them against its schemas.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.actors.rendering.tool_formats.base import TaggedFormat, ToolFormat
from headrace.actors.rendering.tool_formats.deepseek import DeepSeekToolFormat, bar_token
from headrace.actors.rendering.tool_formats.gpt_oss import GptOssToolFormat
from headrace.actors.rendering.tool_formats.hermes import HermesToolFormat
from headrace.actors.rendering.tool_formats.inline import InlineToolFormat
from headrace.actors.rendering.tool_formats.llama import LlamaToolFormat
from headrace.actors.rendering.tool_formats.qwen_coder import QwenCoderToolFormat
from headrace.actors.rendering.tool_formats.thoughts import Thoughts
from headrace.platform.errors import ConfigError

__all__ = ["ToolFormat", "build_tool_format", "tool_format_of"]

# Formats whose thoughts stand between <think> tags.
_TAGGED: dict[str, Callable[[], TaggedFormat]] = {
    "hermes": HermesToolFormat,
    "qwen3-coder": QwenCoderToolFormat,
    "llama-3": LlamaToolFormat,
    "deepseek": DeepSeekToolFormat,
}
_KNOWN = sorted([*_TAGGED, "inline", "gpt-oss"])
# What only the template of one format holds, the most telling first.
_SIGNS = (
    ("gpt-oss", "<|channel|>"),
    ("deepseek", bar_token("tool call begin")),
    ("qwen3-coder", "<function="),
    ("hermes", "<tool_call>"),
    ("llama-3", "<|start_header_id|>"),
)


def build_tool_format(
    kind: str, parameters: Mapping[str, Sequence[str]], *, thinks: bool = True, opened: bool = False
) -> ToolFormat:
    """The format named `kind`.

    Args:
        kind: deepseek, gpt-oss, hermes, inline, llama-3 or qwen3-coder.
        parameters: names of each tool's arguments, for `inline` alone.
        thinks: whether thoughts in tags are taken out of what is said; gpt-oss has a channel for them, inline none.
        opened: whether the prompt ends inside of a thought, so that an answer begins with one.

    Raises:
        ConfigError: for an unknown kind.
    """
    if kind == "inline":
        return InlineToolFormat(parameters)
    if kind == "gpt-oss":
        return GptOssToolFormat()
    if kind not in _TAGGED:
        raise ConfigError(f"unknown tool format {kind!r}; known: {', '.join(_KNOWN)}")
    tool_format = _TAGGED[kind]()
    return Thoughts(tool_format, opened) if thinks else tool_format


def tool_format_of(template: str) -> str:
    """The kind of format that a chat template's text is for; hermes where nothing tells."""
    return next((kind for kind, sign in _SIGNS if sign in template), "hermes")

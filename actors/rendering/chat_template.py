"""A model's chat template: messages to the text that its tokens are made of.

Templates are programs of whoever published the model. They run in a sandbox, see the variables that Hugging Face gives
them, and one day instead of a clock, so that a prompt is the same in a replay as it was in the episode. Whatever they
raise is a ConfigError that says what was asked of them.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.actors.rendering.plain_text import CLOSE, CUT, OPEN
from headrace.platform.errors import ConfigError

# The day that Llama's template names where it has no clock, and the library of renderers too.
DEFAULT_DAY = datetime.date(2024, 7, 26)
_OURS = (OPEN, CLOSE, CUT)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja2, as Hugging Face writes it.
        variables: what it sees besides messages and tools: names of special tokens, settings such as enable_thinking.
        day: what `strftime_now` tells.

    Raises:
        ConfigError: when `source` is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], day: datetime.date = DEFAULT_DAY) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_refuse, strftime_now=day.strftime)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not Jinja2: {error}") from error
        self._variables = dict(variables)

    def apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], speaks: bool = True
    ) -> str:
        """The text of a prompt, or with `speaks` false that of a conversation after which nobody speaks.

        Raises:
            ConfigError: when the template refuses these messages, or fails.
        """
        try:
            variables = {**self._variables, "add_generation_prompt": speaks}
            return self._template.render(messages=messages, tools=tools or None, **variables)
        except Exception as error:  # the boundary: a template is a stranger's program
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                f"the chat template cannot render the roles {roles}{' with tools' if tools else ''}:"
                f" {type(error).__name__}: {error}"
            ) from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks an assistant's text for others and is no more than that."""

    tags = {"generation"}  # noqa: RUF012 - the type that the base class asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates mean it; that of Jinja escapes for HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if not ensure_ascii:
        return text
    return "".join(char if char.isascii() or char in _OURS else json.dumps(char)[1:-1] for char in text)

"""Secrets are references, resolved at the moment of use: `${env:NAME}` and `${file:PATH}` inside any string.

A configuration, and whatever is dumped from it, holds the reference only. `resolve` turns it into the value where a
connection is opened; the values that it has seen go into a `SecretValues`, which takes them out of log lines. A missing
secret is named by its reference; no message ever holds a value. Which log handlers redact is left to observability.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

from headrace.platform.errors import ConfigError

_REFERENCE = re.compile(r"\$\{(env|file):([^}]+)\}")
_USERINFO = re.compile(r"(^[a-z][a-z0-9+.-]*://)(.*)(@)", re.IGNORECASE | re.DOTALL)
_URL_PASSWORD = re.compile(r"(://[^:@/?#\s]*:)(\S*)(@)")
_QUERY_PASSWORD = re.compile(r"(://\S*?[?&](?:password|passwd|token)=)([^&\s]*)()", re.IGNORECASE)
_STAND_IN = "[secret]"


class SecretValues:
    """The values resolved so far, for redaction. Holds them in memory only and never shows them in its repr."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def add(self, value: str) -> None:
        """Remember a value, and the form that it takes inside a URL."""
        self._values.update({value, quote(value, safe="")} - {""})

    def redact(self, text: str) -> str:
        """`text` with every remembered value replaced by `[secret]`; the longest first, as one may hold another."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, _STAND_IN)
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"SecretValues({len(self._values)} values)"


def resolve(text: str, secrets: SecretValues | None = None, env: Mapping[str, str] = os.environ) -> str:
    """`text` with its references replaced by their values, which are added to `secrets`.

    Inside the `user:password@` part of a URL a value is percent-encoded, so secrets are stored as they are. The last
    line break of a file is dropped. Raises ConfigError that names a reference whose value is missing or empty.
    """

    def value_of(match: re.Match[str]) -> str:
        value = _read(match.group(1), match.group(2), env)
        if secrets is not None:
            secrets.add(value)
        return value

    def encode_userinfo(match: re.Match[str]) -> str:
        userinfo = _REFERENCE.sub(lambda reference: quote(value_of(reference), safe=""), match.group(2))
        return match.group(1) + userinfo + match.group(3)

    return _REFERENCE.sub(value_of, _USERINFO.sub(encode_userinfo, text))


def literal_password(text: str) -> bool:
    """Whether `text` is a URL that spells a password out, wholly or in part, instead of referring to it."""
    bare = _REFERENCE.sub("", text)
    return any(match.group(2) for pattern in (_URL_PASSWORD, _QUERY_PASSWORD) for match in pattern.finditer(bare))


def without_password(text: str) -> str:
    """`text` for a message: a URL that spells a password out has `***` in its place."""
    if not literal_password(text):
        return text
    return _QUERY_PASSWORD.sub(r"\1***\3", _URL_PASSWORD.sub(r"\1***\3", text))


def _read(kind: str, name: str, env: Mapping[str, str]) -> str:
    reference = f"${{{kind}:{name}}}"
    if kind == "env":
        value = env.get(name, "")
        if not value:
            raise ConfigError(f"the secret {reference} is missing: set the environment variable {name}")
        return value
    try:
        value = Path(name).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"the secret {reference} cannot be read: {cause}") from None
    if not value:
        raise ConfigError(f"the secret {reference} is empty: write the value into the file")
    return value

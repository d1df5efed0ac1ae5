"""What a response says, as text that is safe to make: bounded, decoded by a known character set, or only named."""

import codecs
from collections.abc import AsyncIterator

_CHARSETS = frozenset(
    codecs.lookup(name).name
    for name in (
        *("utf-8", "ascii", "latin-1", "cp1250", "cp1251", "cp1252", "iso8859-2", "iso8859-5", "iso8859-15", "koi8-r"),
        *("utf-16", "utf-16-le", "utf-16-be", "gb18030", "gbk", "gb2312", "big5", "shift_jis", "euc-jp", "euc-kr"),
    )
)
"""Those that a page may name; Python knows others that are no character sets at all."""
_TEXTUAL = ("json", "xml", "javascript", "ecmascript", "yaml", "x-www-form-urlencoded", "toml", "x-sh", "sql")


async def read_bounded(chunks: AsyncIterator[bytes], limit_bytes: int) -> tuple[bytes, bool]:
    """At most `limit_bytes` of what comes, and whether there is more."""
    found = bytearray()
    async for chunk in chunks:
        found += chunk
        if len(found) > limit_bytes:
            return bytes(found[:limit_bytes]), True
    return bytes(found), False


def text_of(body: bytes, has_more: bool, content_type: str, encoding: str) -> str:
    """A body as the model reads it.

    Args:
        body: its bytes.
        has_more: they are not all.
        content_type: as the server says.
        encoding: as the server says: what is not plain is not unpacked, so that little cannot become much.
    """
    kind, charset = _read_type(content_type)
    size = f"{'more than ' if has_more else ''}{len(body)} bytes"
    if encoding.strip().lower() not in ("", "identity"):
        return f"[{size} in the encoding {encoding[:40]}, not shown]"
    if not _is_text(kind, body):
        return f"[{size} of {kind or 'an unknown type'}, not shown]"
    text = body.decode(charset, "replace")
    return f"{text}\n[... there is more than these {len(body)} bytes ...]" if has_more else text


def _read_type(content_type: str) -> tuple[str, str]:
    kind, *parameters = content_type[:256].split(";")
    charset = "utf-8"
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            try:
                found = codecs.lookup(value.strip().strip("\"'")).name
            except (LookupError, ValueError):
                continue
            charset = found if found in _CHARSETS else charset
    return kind.strip().lower(), charset


def _is_text(kind: str, body: bytes) -> bool:
    if kind.startswith("text/") or any(word in kind.partition("/")[2] for word in _TEXTUAL):
        return True
    return not kind and b"\0" not in body[:1024]

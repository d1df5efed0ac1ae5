"""A tokenizer as the library of renderers wants it, over `tokenizers` alone: transformers costs seconds to import."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from headrace.actors.rendering.plain_text import CUT


class LibraryTokenizer:
    """Scaffold and texts from outside come in one string; where a text was cut, no special token can form (case T5)."""

    name_or_path = ""
    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of a text, without any that a post-processor would add."""
        encode = self._tokenizer.encode
        if CUT not in text:
            return list(encode(text, add_special_tokens=False).ids)
        return [i for part in text.split(CUT) for i in encode(part, add_special_tokens=False).ids]

    def decode(self, token_ids: Sequence[int], *_: Any, **__: Any) -> str:
        """Text of ids, special tokens among it."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token, None where there is none."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def known_id(self, token: str) -> int:
        """The id of a token. Raises ValueError where there is none."""
        if (token_id := self.convert_tokens_to_ids(token)) is None:
            raise ValueError(f"{token!r} is not in the vocabulary")
        return token_id

"""Text from outside as token ids, without any marker of a conversation among them (case T5).

A tokenizer sees markers in two ways: as added tokens, wherever their text occurs, and as words of its vocabulary. Its
own switch covers added tokens that are declared special; what slips through is cut in two, so that it is encoded as
characters. `CUT` keeps the cut visible where a text has to pass through a chat template first.
"""

import functools
import itertools
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

# Private-use characters, which no vocabulary and no template contains: the first two enclose a message's index.
OPEN, CLOSE, CUT = "\ue000", "\ue001", "\ue002"
_OURS = str.maketrans(dict.fromkeys((OPEN, CLOSE, CUT), "\ufffd"))
# Tools repeat themselves ("ok", "not found"): the ids of texts up to this length are remembered.
_SHORT = 64
# What stands for an unknown word is no marker.
_UNKNOWN = ("<unk>", "[UNK]")


class PlainText:
    """Encodes plain text with a tokenizer of its own, which is a copy of `tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        unknown = (*_UNKNOWN, getattr(tokenizer.model, "unk_token", None))
        markers = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if (token.special or token.content.startswith("<")) and token.content not in unknown
        }
        self._marker_ids = frozenset(markers)
        longest_first = sorted(markers.values(), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # `<` and `>` around a text may come from a template: a tag's name is cut off from them.
        self._names = frozenset(content.strip("</>") for content in markers.values() if content.startswith("<"))
        self._short = functools.lru_cache(maxsize=8192)(self._encode)

    def encode(self, text: str) -> Sequence[int]:
        """The ids of `text`; none of them is a marker."""
        return self._short(text) if len(text) <= _SHORT else self._encode(text)

    def cut(self, text: str) -> str:
        """`text` with `CUT` inside every marker, and without the characters that this module reserves."""
        if text in self._names:
            return f"{CUT}{text}"
        return self._marker.sub(lambda match: f"{match[0][0]}{CUT}{match[0][1:]}", text.translate(_OURS))

    def _encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._marker_ids.isdisjoint(ids):
            return ids
        cuts = [0, *(match.start() + 1 for match in self._marker.finditer(text)), len(text)]
        parts = (text[start:end] for start, end in itertools.pairwise(cuts))
        encoded = (self._tokenizer.encode(part, add_special_tokens=False).ids for part in parts)
        return [token_id for ids in encoded for token_id in ids if token_id not in self._marker_ids]

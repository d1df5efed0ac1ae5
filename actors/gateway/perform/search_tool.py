"""`search`: full-text search over a folder of documents, and reading of what was found.

The corpus is indexed once for all episodes, beside the event loop. Every call only reads.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.actors.gateway.boxed import mounted_spec
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.perform.corpus import TOKENIZERS, Corpus
from headrace.actors.gateway.perform.performer import ToolFailed, read_args
from headrace.actors.gateway.policy import Mount
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolSpec

_MOST_RESULTS = 20
_PAGE = 8000


class SearchArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The `args` of a mount. `words` says what counts as one; `trusted` is the author's word that the texts are his."""

    corpus: str
    words: Literal["plain", "stemmed", "trigrams"] = "plain"
    trusted: bool = False


class SearchTool:
    """See the module. Made by `make`."""

    def __init__(self, search: ToolSpec, read: ToolSpec, corpus: Corpus) -> None:
        self.specs = {search.name: search, read.name: read}
        self._search = search.name
        self._corpus = corpus

    @classmethod
    async def make(cls, mount: Mount) -> "SearchTool":
        """The tools of a mount, with its corpus indexed.

        Raises:
            ConfigError: its args are none, or the folder has no documents.
        """
        args = read_args(mount, SearchArgs)
        try:
            corpus = await asyncio.to_thread(Corpus, Path(args.corpus), TOKENIZERS[args.words])
        except (OSError, ValueError) as error:
            raise ConfigError(f"tools: search: args.corpus: {error}") from None
        return cls(*search_specs(mount, args), corpus)

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolOutput:
        """See `Performer`."""
        arguments = asked.call.arguments
        if asked.call.name == self._search:
            return await asyncio.to_thread(self._found, str(arguments["query"]), int(arguments.get("limit", 5)))
        return await asyncio.to_thread(self._page, str(arguments["id"]), int(arguments.get("offset", 0)))

    async def end(self, scope: str) -> None:
        """See `Performer`. Nothing is held for an episode."""

    async def close(self) -> None:
        """See `Performer`."""
        await asyncio.to_thread(self._corpus.close)

    def _found(self, query: str, limit: int) -> ToolOutput:
        found = self._corpus.search(query, min(limit, _MOST_RESULTS))
        if not found:
            return ToolOutput("no documents found")
        return ToolOutput("\n\n".join(f"id: {each.id}\ntitle: {each.title}\n{each.snippet}" for each in found))

    def _page(self, document: str, offset: int) -> ToolOutput:
        try:
            title, length, text = self._corpus.read(document, offset, _PAGE)
        except KeyError:
            raise ToolFailed(f"there is no document {document[:200]!r}") from None
        if offset and offset >= length:
            raise ToolFailed(f"{document} has {length} characters")
        end = offset + len(text)
        more = f"; go on with offset {end}" if end < length else ""
        return ToolOutput(f"{title}\ncharacters {offset} to {end} of {length}{more}\n\n{text}")


def search_specs(mount: Mount, args: SearchArgs) -> tuple[ToolSpec, ToolSpec]:
    """The tools of a mount: the one that searches, and the one that reads."""
    search, read = (mounted_spec(spec, mount, alone=False) for spec in (_SEARCH, _READ))
    return (
        msgspec.structs.replace(search, trusted=args.trusted),
        msgspec.structs.replace(read, trusted=args.trusted),
    )


def _spec(name: str, told: str, properties: dict[str, Any], needs: str) -> ToolSpec:
    parameters = {"type": "object", "properties": properties, "required": [needs], "additionalProperties": False}
    return ToolSpec(name, told, parameters)


_TEXT = {"type": "string", "minLength": 1}
_SEARCH = _spec(
    "search",
    "Search the documents for words; those that fit best come first, with their ids.",
    {"query": _TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": _MOST_RESULTS, "default": 5}},
    "query",
)
_READ = _spec(
    "read_document",
    f"Read a document that `search` has found, {_PAGE} characters at once.",
    {"id": _TEXT, "offset": {"type": "integer", "minimum": 0, "default": 0}},
    "id",
)

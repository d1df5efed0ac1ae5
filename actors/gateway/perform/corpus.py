"""A folder of documents, indexed for full-text search by SQLite's FTS5 and ranked by its BM25.

Documents are `.txt` and `.md` files, whose ids are their paths, and the lines of `.jsonl` files: objects with `text`
(or `contents`) and, if they like, `id` and `title`. The index is a private file that is gone with the process.
The same folder gives the same results in the same order. Links that lead out of the folder are passed over.
"""

import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

TOKENIZERS = {
    "plain": "unicode61 remove_diacritics 2",
    "stemmed": "porter unicode61 remove_diacritics 2",
    "trigrams": "trigram",
}
"""By what a recipe calls them; trigrams are for scripts that do not part words, and find nothing shorter than three."""
_SUFFIXES = (".txt", ".md", ".jsonl")
_WORD = re.compile(r"\w+")
_MOST_WORDS = 32
_TITLE_WEIGHT = 4.0
_SNIPPET_WORDS = 40
_MOST_TITLE = 200


class Found(NamedTuple):
    """A document that fits a query, and a piece of it around what was asked for."""

    id: str
    title: str
    snippet: str


class Corpus:
    """See the module. Methods block, and may be called from any thread.

    Args:
        folder: of the documents.
        tokenizer: one of `TOKENIZERS`.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no documents, or one that is none; the message names it.
    """

    def __init__(self, folder: Path, tokenizer: str) -> None:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is no folder")
        self._lock = threading.Lock()
        self._database = sqlite3.connect("", check_same_thread=False)
        try:
            self._index(folder, tokenizer)
        except BaseException:
            self.close()
            raise

    def search(self, query: str, limit: int) -> list[Found]:
        """The documents that hold any word of `query`, the best first; none for a query without words."""
        words = list(dict.fromkeys(_WORD.findall(query)))[:_MOST_WORDS]
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._database.execute(
                f"SELECT documents.id, documents.title, snippet(found, 1, '', '', ' ... ', {_SNIPPET_WORDS})"
                " FROM found JOIN documents ON documents.number = found.rowid WHERE found MATCH ?"
                f" ORDER BY bm25(found, {_TITLE_WEIGHT}, 1.0), found.rowid LIMIT ?",
                (asked, limit),
            ).fetchall()
        return [Found(identity, title, " ".join(snippet.split())) for identity, title, snippet in rows]

    def read(self, document: str, offset: int, count: int) -> tuple[str, int, str]:
        """Title, length in characters, and `count` characters from `offset` on. Raises KeyError."""
        with self._lock:
            row = self._database.execute(
                "SELECT title, length(body), substr(body, ?, ?) FROM documents WHERE id = ?",
                (offset + 1, count, document),
            ).fetchone()
        if row is None:
            raise KeyError(document)
        title, length, text = row
        return title, length, text

    def close(self) -> None:
        """Forget it. Safe to call twice."""
        with self._lock:
            self._database.close()

    def _index(self, folder: Path, tokenizer: str) -> None:
        database = self._database
        database.execute("CREATE TABLE documents(number INTEGER PRIMARY KEY, id TEXT UNIQUE, title TEXT, body TEXT)")
        database.execute(
            "CREATE VIRTUAL TABLE found USING fts5(title, body, content='documents', content_rowid='number',"
            f" tokenize='{tokenizer}')"
        )
        count = 0
        for document in _documents(folder):
            try:
                database.execute("INSERT INTO documents(id, title, body) VALUES (?, ?, ?)", document)
            except sqlite3.IntegrityError:
                raise ValueError(f"two documents of {folder} have the id {document[0]!r}") from None
            count += 1
        if not count:
            raise _none(folder)
        database.execute("INSERT INTO found(found) VALUES ('rebuild')")
        database.commit()


def check_corpus(folder: Path) -> None:
    """Refuse a folder that cannot become a `Corpus`, as far as file names, permissions and its first document show.

    Raises:
        OSError: a file of it cannot be read.
        ValueError: it has no documents, or the first is none.
    """
    for _, path in _files(folder):
        if not os.access(path, os.R_OK):
            raise PermissionError(f"{path} cannot be read")
    if next(_documents(folder), None) is None:
        raise _none(folder)


def _none(folder: Path) -> ValueError:
    return ValueError(f"{folder} has no documents; they are files of {', '.join(_SUFFIXES)}")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and path of each file with documents, in the order of their paths."""
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file() and path.resolve().is_relative_to(root):
            yield path.relative_to(folder).as_posix(), path


def _documents(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Id, title and text of each, in the order of `_files`."""
    for name, path in _files(folder):
        if path.suffix == ".jsonl":
            yield from _lines(path, name)
        else:
            text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "\ufffd")
            yield name, _title(text) or path.stem, text


def _lines(path: Path, name: str) -> Iterator[tuple[str, str, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record: Any = msgspec.json.decode(line)
                text = record.get("text", record.get("contents"))
                if not isinstance(text, str):
                    raise ValueError("it has no `text`")
            except (msgspec.DecodeError, ValueError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            title = str(record.get("title") or _title(text))[:_MOST_TITLE]
            yield str(record.get("id", f"{name}:{number}")), title, text.replace("\0", "\ufffd")


def _title(text: str) -> str:
    """The first line that says something."""
    for line in text.splitlines():
        if plain := line.strip().lstrip("#").strip():
            return plain[:_MOST_TITLE]
    return ""

"""Whether audit chains are whole: every hash computed again, and every head that an episode names looked up.

Without heads a chain shows what was changed, taken out, put in or reordered before its last entry. What an intruder
makes anew up to the end, or cuts off there, shows by the heads that lie in the episodes. A last line that a crash tore
is no break as long as no head names it. Chains are read line by line: memory holds one line and the heads.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from headrace.actors.gateway.audit.entry import SCHEMA_VERSION, Entry, Head, Header, line_hash

SUFFIX = ".jsonl"
BreakKind = Literal[
    "header",
    "unreadable",
    "altered",
    "removed",
    "reordered",
    "duplicate",
    "cut off",
    "other head",
    "no chain",
    "no head",
]

_entries = msgspec.json.Decoder(Entry)
_headers = msgspec.json.Decoder(Header)


class Break(msgspec.Struct, frozen=True):
    """One place where a chain does not hold. `number` is that of the line, -1 where it is none."""

    kind: BreakKind
    chain: str
    number: int
    told: str
    episode: str = ""


class ChainFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is in one chain: entries without the header, by kind, and denials by rule. `torn`: its last line is."""

    chain: str
    host: str = ""
    build: str = ""
    began_s: float = 0.0
    entries: int = 0
    torn: bool = False
    by_kind: dict[str, int] = {}
    denied: dict[str, int] = {}


class Report(msgspec.Struct, frozen=True):
    """What `verify` found. `heads` counts the episodes that name a head."""

    chains: tuple[ChainFacts, ...]
    breaks: tuple[Break, ...]
    heads: int

    @property
    def holds(self) -> bool:
        """Nothing is broken."""
        return not self.breaks


def verify(folder: Path, heads: Mapping[str, str]) -> Report:
    """Verify the chains in a local folder; one that is missing holds none. See `verify_chains`."""
    return verify_chains(_chains_in(folder), heads)


def verify_chains(chains: Iterable[tuple[str, Iterable[bytes]]], heads: Mapping[str, str]) -> Report:
    """Verify chains: (name, lines with their newlines).

    Args:
        chains: every one that there is, each read once.
        heads: by episode id, the head that it names; empty where it called tools and names none.
    """
    wanted: dict[str, dict[int, list[tuple[str, str]]]] = {}
    breaks: list[Break] = []
    for episode, text in heads.items():
        if not text:
            told = f"{episode} called tools, and names no entry of the audit"
            breaks.append(Break("no head", "", -1, told, episode))
            continue
        try:
            head = Head.parse(text)
        except ValueError as error:
            breaks.append(Break("no head", "", -1, f"{episode}: {error}", episode))
            continue
        wanted.setdefault(head.chain, {}).setdefault(head.number, []).append((head.hash, episode))
    facts: list[ChainFacts] = []
    for name, lines in chains:
        reading = _Reading(name, wanted.pop(name, {}))
        facts.append(reading.through(lines))
        breaks += reading.breaks
    for chain, numbers in wanted.items():
        for number, named in numbers.items():
            for _, episode in named:
                told = f"{episode} names entry {number} of {chain}, and there is no such chain"
                breaks.append(Break("no chain", chain, number, told, episode))
    return Report(tuple(facts), tuple(breaks), sum(1 for text in heads.values() if text))


def read_entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    """The entries of a chain that can be read; what cannot is for `verify` to name."""
    for position, line in enumerate(lines):
        if position:
            try:
                yield _entries.decode(line)
            except msgspec.DecodeError:
                continue


class _Reading:
    """One chain while it is read. `heads` are (hash, episode) by the number that they name."""

    def __init__(self, name: str, heads: Mapping[int, list[tuple[str, str]]]) -> None:
        self.breaks: list[Break] = []
        self._name, self._heads = name, heads
        self._previous = ""
        self._number = -1  # of the line before
        self._met: set[int] = set()  # numbers that heads name
        self._kinds: Counter[str] = Counter()
        self._denied: Counter[str] = Counter()

    def through(self, lines: Iterable[bytes]) -> ChainFacts:
        """Read to the end."""
        header = Header(chain=self._name, began_s=0.0, host="", build="")
        torn = False
        for position, line in enumerate(lines):
            if not line.endswith(b"\n"):
                torn = True
                break
            bare = line[:-1]
            if position:
                self._entry(bare, position)
            else:
                header = self._header(bare) or header
            self._previous = line_hash(bare)
            self._compare()
        self._cut_off()
        return ChainFacts(
            chain=self._name,
            host=header.host,
            build=header.build,
            began_s=header.began_s,
            entries=sum(self._kinds.values()),
            torn=torn,
            by_kind=dict(self._kinds),
            denied=dict(self._denied),
        )

    def _header(self, line: bytes) -> Header | None:
        self._number = 0
        try:
            header = _headers.decode(line)
        except msgspec.DecodeError as error:
            self._broken("header", 0, f"its first line is no header: {error}")
            return None
        if header.schema_version != SCHEMA_VERSION:
            self._broken("header", 0, f"schema {header.schema_version} is not one that this build reads")
        if header.chain != self._name:
            self._broken("header", 0, f"its header is that of {header.chain!r}")
        return header

    def _entry(self, line: bytes, position: int) -> None:
        before = self._number
        self._number = before + 1
        try:
            entry = _entries.decode(line)
        except msgspec.DecodeError as error:
            self._broken("unreadable", self._number, f"line {position + 1} is no entry: {error}")
            return
        self._kinds[entry.kind] += 1
        if entry.decision in ("deny", "stopped"):
            self._denied[entry.rule] += 1
        self._number = entry.number
        if entry.number == before:
            self._broken("duplicate", entry.number, f"entry {entry.number} is there twice")
        elif entry.number < before:
            self._broken("reordered", entry.number, f"entry {entry.number} comes after entry {before}")
        elif entry.number > before + 1:
            gone = f"entry {before + 1}" if entry.number == before + 2 else f"entries {before + 1}-{entry.number - 1}"
            self._broken("removed", before + 1, f"{gone} are missing" if "-" in gone else f"{gone} is missing")
        elif entry.previous != self._previous:
            self._broken("altered", before, f"line {position} is not what entry {entry.number} was added to")
        elif entry.chain != self._name:
            self._broken("altered", entry.number, f"entry {entry.number} is of the chain {entry.chain!r}")

    def _compare(self) -> None:
        for wanted, episode in self._heads.get(self._number, ()):
            self._met.add(self._number)
            if wanted != self._previous:
                told = f"entry {self._number} is not the one that {episode} names"
                self._broken("other head", self._number, told, episode)

    def _cut_off(self) -> None:
        for number in sorted(self._heads.keys() - self._met):
            for _, episode in self._heads[number]:
                told = f"{episode} names entry {number}, which is not there; the last one is {self._number}"
                self._broken("cut off", number, told, episode)

    def _broken(self, kind: BreakKind, number: int, told: str, episode: str = "") -> None:
        self.breaks.append(Break(kind, self._name, number, told, episode))


def _chains_in(folder: Path) -> Iterator[tuple[str, Iterable[bytes]]]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as lines:
            yield path.name.removesuffix(SUFFIX), lines

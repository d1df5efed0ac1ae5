"""Reward rows as they are written, for a reader that asks for those of a few episodes again and again.

A learner wants the rows of each batch, and the table grows with the run: so every file is read once, from where the
last look ended. Rows of episodes that nobody has asked for yet are kept, of the newest `MOST_KEPT`
episodes. Files of lines only grow (lines.py), on object
stores too, where a segment is written anew with the same beginning. A worker writes the rows of an episode before it
puts the episode, so whoever was given an episode finds them.
"""

from collections.abc import Sequence

from headrace.platform.records.tables import RewardRow
from headrace.platform.store.files import open_url
from headrace.platform.store.lines import line_files
from headrace.platform.store.tables import RewardTable, counting_rows

MOST_KEPT = 20_000


class RewardFeed:
    """The reward table of the run root `root_url`, read on and on. Calls block; one thread at a time."""

    def __init__(self, root_url: str) -> None:
        self._table = RewardTable(root_url)
        self._fs, root = open_url(root_url)
        self._files = f"{root}/{RewardTable.folder}/*.jsonl"
        self._read: dict[str, int] = {}  # bytes by file, up to the end of a line
        self._rows: dict[str, list[RewardRow]] = {}

    def take(self, episode_ids: Sequence[str]) -> dict[str, list[RewardRow]]:
        """The rows that count of these episodes, by episode id; one without any is left out. They are given once:
        whoever asks again, or for one that waited very long, makes the feed read the whole table."""
        if any(episode not in self._rows for episode in episode_ids):
            self._read_on()
        found = {episode: self._rows.pop(episode) for episode in episode_ids if episode in self._rows}
        if missing := set(episode_ids) - set(found):
            for row in self._table.rows():
                if row.episode_id in missing:
                    found.setdefault(row.episode_id, []).append(row)
        return {episode: counting_rows(rows) for episode, rows in found.items()}

    def _read_on(self) -> None:
        files = line_files(self._fs, self._files)
        sizes = {file: int(self._fs.size(file)) for file in files}
        grown = [file for file in files if sizes[file] > self._read.get(file, 0)]
        starts, ends = [self._read.get(file, 0) for file in grown], [sizes[file] for file in grown]
        for file, data in zip(grown, self._fs.cat_ranges(grown, starts, ends, on_error="raise"), strict=True):
            whole = bytes(data)[: bytes(data).rfind(b"\n") + 1]
            for row in self._table.parsed(file, whole):
                self._rows.setdefault(row.episode_id, []).append(row)
            self._read[file] = self._read.get(file, 0) + len(whole)
        while len(self._rows) > MOST_KEPT:
            del self._rows[next(iter(self._rows))]

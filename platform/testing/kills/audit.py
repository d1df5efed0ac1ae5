"""What a run root says about exactly-once after the fact: from manifests, receipts and fates, each on its own.

Reads only. `head` is the version that the run ended with; what lies off its lineage was rolled back (P6).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.platform.ledger.chain import lineage
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Fate
from headrace.platform.records.versions import VersionManifest
from headrace.platform.store.files import open_url
from headrace.platform.store.tables import FateTable, ReceiptTable

_KINDS = ("trained", "dropped", "failed", "cancelled", "in_flight")


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """`twice` names slots that were trained more than once and by which source, `unaccounted` attempts that one source
    knows as trained and another does not; `lost` is dispatched minus the sum of all fates (P3)."""

    trained: int
    twice: tuple[str, ...]
    unaccounted: tuple[str, ...]
    lost: int

    @property
    def holds(self) -> bool:
        """Never lost, never twice."""
        return not (self.twice or self.unaccounted or self.lost)


def manifests_of(root_url: str) -> dict[int, VersionManifest]:
    """Every manifest of a run root, by number; a torn one was never made durable, and so never committed."""
    fs, root = open_url(root_url)
    found = {}
    for file in fs.glob(f"{root}/versions/*.json"):
        try:
            manifest = msgspec.json.decode(fs.cat_file(file), type=VersionManifest)
        except msgspec.DecodeError:
            continue
        found[manifest.ref.number] = manifest
    return found


def trained_twice(root_url: str, head: int) -> dict[str, list[str]]:
    """Slots that were trained more than once along the lineage of `head`, by the source that says so (P1)."""
    manifests = manifests_of(root_url)
    line = set(lineage(manifests, head))
    consumed = [name for number in line for name, fate in manifests[number].consumed.items() if fate == Fate.TRAINED]
    receipts = [row.episode_id for row in ReceiptTable(root_url).rows() if row.version in line]
    rows = FateTable(root_url).by_episode().values()
    return {
        "manifests": _twice(consumed),
        "receipts": _twice(receipts),
        "fates": _twice([row.episode_id for row in rows if row.fate is Fate.TRAINED]),
    }


def audit(root_url: str, summary: Mapping[str, Any]) -> Audit:
    """Judge a run by its root and its summary."""
    head, fates = int(summary["version"]), summary["fates"]
    manifests = manifests_of(root_url)
    line = set(lineage(manifests, head))
    consumed = {name for number in line for name, fate in manifests[number].consumed.items() if fate == Fate.TRAINED}
    receipts = {row.episode_id for row in ReceiptTable(root_url).rows() if row.version in line}
    rows = FateTable(root_url).by_episode().values()
    decided = {row.episode_id for row in rows if row.fate is Fate.TRAINED}
    twice = trained_twice(root_url, head)
    differing = (consumed ^ receipts) | (consumed ^ decided)
    if fates["trained"] != len(consumed):
        differing.add(f"the ledger counts {fates['trained']} trained attempts, the manifests {len(consumed)}")
    return Audit(
        trained=len(consumed),
        twice=tuple(f"{slot} ({source})" for source, slots in twice.items() for slot in slots),
        unaccounted=tuple(sorted(differing)),
        lost=int(fates["dispatched"]) - sum(int(fates[kind]) for kind in _KINDS),
    )


def _twice(episode_ids: Iterable[str]) -> list[str]:
    """The slots of these episodes that occur more than once."""
    slots = Counter((parsed.group, parsed.sample) for parsed in map(AttemptId.parse, episode_ids))
    return [f"t{group}.{sample}" for (group, sample), n in sorted(slots.items()) if n > 1]

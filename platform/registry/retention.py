"""Which files of versions may go: decisions without I/O. Whether somebody pins a version is the pin table's business.

An orphan is a blob that no readable manifest names: what a crash left between files and manifest, or a manifest torn.
"""

from collections.abc import Collection, Mapping, Sequence

from headrace.platform.registry.hashing import Blob


def unwanted(present: Collection[int], keep: Collection[int], newest: int) -> Sequence[int]:
    """The versions among `present` that are neither in `keep` nor among the `newest` ones, in order."""
    ordered = sorted(present)
    kept = {*keep, *ordered[max(len(ordered) - newest, 0) :]}
    return [number for number in ordered if number not in kept]


def dead_orphans(blobs: Collection[Blob], named: Mapping[int, int], fence: int) -> Sequence[Blob]:
    """The orphans that nobody can complete any more, in order.

    Whoever writes under `fence`, the present one, or under a later one may be about to create the manifest. An orphan
    above every manifest stays as well: it is all that remembers that its number was used (P6).

    Args:
        blobs: every blob there is.
        named: fence by number, of every readable manifest.
        fence: the present fence, as the ledger says.
    """
    top = max(named, default=-1)
    orphans = (blob for blob in blobs if named.get(blob.number) != blob.fence)
    return sorted(blob for blob in orphans if blob.fence < fence and blob.number <= top)

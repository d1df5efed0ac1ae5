"""Learner ranks agree on a step before any of them takes it (P13).

Every rank hashes what it is about to train on; the digests are gathered and compared before the weights are touched.
So a rank that got another batch, or is gone, costs the step and never the weights: they are as before, and rank 0
gives its leases back. Which ranks there are, and who feeds them, is the backend's business.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from headrace.platform.errors import RunFailed

Gather: TypeAlias = Callable[[str], Sequence[str]]
"""This rank's digest to the digests of all ranks, in the order of the ranks. Blocks. RuntimeError: a rank is lost."""


def step_digest(ids: Sequence[str], parent: int, step: int) -> str:
    """SHA-256, as hex, over the episodes of a batch in order, the version it starts from, and the step's number."""
    digest = hashlib.sha256(f"{parent}\n{step}\n".encode())
    for episode_id in ids:
        digest.update(f"{episode_id}\n".encode())
    return digest.hexdigest()


def alone(digest: str) -> list[str]:
    """The `Gather` of a single rank."""
    return [digest]


def over_gloo(timeout_s: float) -> Gather:
    """A `Gather` over all ranks of `torch.distributed`, or `alone` where that is not initialised.

    Every rank must call this at the same place: it opens a group of its own, so that the deadline and the transport
    are those of these few bytes, whatever the gradients use.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return alone
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def gather(digest: str) -> list[str]:
        mine = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, mine, group=group)
        return [bytes(one.tolist()).hex() for one in found]

    return gather


def meeting_place(address: str, world_size: int, deadline_s: float) -> Any:
    """Rank 0's store, at a free port of `address`, where the ranks of `torch.distributed` find one another."""
    patience = timedelta(seconds=deadline_s)
    return dist.TCPStore(address, 0, world_size, True, patience, wait_for_workers=False)  # type: ignore[attr-defined]


def agree(digest: str, gather: Gather) -> None:
    """Return when every rank is about to take the same step.

    Raises:
        RunFailed: a rank is lost or silent, or is about to train on something else. No rank has stepped.
    """
    try:
        digests = list(gather(digest))
    except RuntimeError as error:
        raise RunFailed(f"a learner rank is lost; the weights are as before: {error}") from error
    others = [rank for rank, found in enumerate(digests) if found != digest]
    if others:
        raise RunFailed(
            f"learner ranks {others} are about to take another step than this one; the weights are as before: digest"
            f" {digest[:12]} here, {', '.join(digests[rank][:12] for rank in others)} there"
        )

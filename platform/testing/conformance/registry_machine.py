"""Versions and pins as a Hypothesis state machine, for any registry. Needs Hypothesis; no suite imports this module.

The machine publishes, crashes at each step of a publication, resumes from its last checkpoint, pins, lets time pass,
and removes what is old. It knows what it did; after every move the registry must agree.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.platform.errors import NotFound
from headrace.platform.ledger.policy import NO_VERSION
from headrace.platform.records.versions import VersionManifest
from headrace.platform.testing.conformance.ledger_harness import raises
from headrace.platform.testing.conformance.registry import RegistryHarness

_TTL_S = 60.0
_HOLDERS = st.sampled_from(("replica", "evaluation"))
_CHOICE = st.integers(0, 30)


class RegistryMachine(RuleBasedStateMachine):
    """Subclass it with `factory`, which makes a fresh registry for each example."""

    factory: Callable[[], AbstractAsyncContextManager[RegistryHarness]]

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._h = self._run(self._stack.enter_async_context(type(self).factory()))
        self._now_s = 0.0
        self._manifests: dict[int, VersionManifest] = {}
        self._orphans: list[VersionManifest] = []
        self._removed: set[int] = set()
        self._pins: dict[tuple[int, str], float] = {}
        self._checkpoints: list[int] = []
        self._head = NO_VERSION
        self._highest = NO_VERSION
        self._epoch = 0

    def teardown(self) -> None:
        """Close what the factory opened."""
        self._run(self._stack.aclose())
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return self._loop.run(work)

    def _some(self, choice: int) -> int:
        return sorted(self._manifests)[choice % len(self._manifests)]

    def _pinned(self) -> set[int]:
        return {version for (version, _), until_s in self._pins.items() if until_s > self._now_s}

    # --- publishing ---------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Publish version 0 with its checkpoint, as every run does."""
        self.publish()
        self.complete_checkpoint()

    def _prepare(self) -> VersionManifest:
        manifest: VersionManifest = self._run(self._h.prepare({"weights": f"of {self._highest + 1}".encode()}))
        assert manifest.ref.number > self._highest, f"version {manifest.ref.number} was used before (P6)"
        assert manifest.parent == (None if self._head == NO_VERSION else self._head)
        self._highest = manifest.ref.number
        return manifest

    def _declare(self, manifest: VersionManifest) -> None:
        self._run(self._h.registry.manifest(manifest))
        self._manifests[manifest.ref.number] = manifest

    @rule()
    def publish(self) -> None:
        """Files, manifest, commit."""
        manifest = self._prepare()
        self._declare(manifest)
        self._run(self._h.commit(manifest))
        self._head = manifest.ref.number

    @rule()
    def crash_before_manifest(self) -> None:
        """Leave an orphan; the next learner goes on."""
        self._orphans.append(self._prepare())
        self.resume()

    @rule()
    def crash_before_commit(self) -> None:
        """Leave a manifest that was never committed; the next learner goes on."""
        self._declare(self._prepare())
        self.resume()

    @rule()
    def complete_checkpoint(self) -> None:
        """Settle the head."""
        self._run(self._h.ledger.settle(self._h.fence, self._head))
        self._checkpoints.append(self._head)

    @rule()
    def resume(self) -> None:
        """A new learner starts from the last complete checkpoint."""
        self._run(self._h.take_over())
        self._head = self._checkpoints[-1]
        self._run(self._h.ledger.rollback(self._h.fence, self._head))

    @rule()
    def claim_epoch(self) -> None:
        """Epochs only go up (P8)."""
        epoch = self._run(self._h.registry.claim_epoch())
        assert epoch > self._epoch, f"epoch {epoch} came after {self._epoch}"
        self._epoch = epoch

    # --- pins and removal ---------------------------------------------------------------------------------------------

    @rule(choice=_CHOICE, holder=_HOLDERS)
    def pin(self, choice: int, holder: str) -> None:
        """Pin or renew; a version that was removed refuses (case Q17)."""
        version = self._some(choice)
        pinned = self._h.registry.pin(version, holder, _TTL_S)
        if version in self._removed:
            self._run(raises(NotFound, pinned))
        else:
            self._run(pinned)
            self._pins[version, holder] = self._now_s + _TTL_S

    @rule(choice=_CHOICE, holder=_HOLDERS)
    def unpin(self, choice: int, holder: str) -> None:
        """Give a pin back, or none."""
        version = self._some(choice)
        self._run(self._h.registry.unpin(version, holder))
        self._pins.pop((version, holder), None)

    @rule(seconds=st.sampled_from((1.0, 30.0, 61.0)))
    def advance(self, seconds: float) -> None:
        """Pins lapse (P12)."""
        self._run(self._h.advance(seconds))
        self._now_s += seconds

    @rule(newest=st.integers(0, 3))
    def retain(self, newest: int) -> None:
        """Keep checkpoints, the head and the newest, as the learner does."""
        keep = {*self._checkpoints[-2:], self._head}
        present = sorted(self._manifests.keys() - self._removed)
        removed = set(self._run(self._h.registry.retain(sorted(keep), newest)))
        expected = set(present[: max(len(present) - newest, 0)]) - keep - self._pinned()
        assert removed == expected, f"removed {sorted(removed)}, not {sorted(expected)}"
        self._removed |= removed

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def what_is_needed_opens(self) -> None:
        """A pinned version, the head and the last complete checkpoint's version are there, as they were written."""
        for version in {*self._pinned(), *self._checkpoints[-1:], *({self._head} - {NO_VERSION})}:
            manifest, folder = self._run(self._h.registry.open(version))
            assert manifest == self._manifests[version]
            assert Path(folder, "weights").read_bytes() == f"of {version}".encode()

    @invariant()
    def the_chain_is_what_was_declared(self) -> None:
        """P6, P8: manifests are never lost, and nothing exists without one; no number is forgotten."""
        declared = [self._manifests[number] for number in sorted(self._manifests)]
        assert list(self._run(self._h.registry.manifests())) == declared
        assert self._run(self._h.registry.latest()) == (declared[-1] if declared else None)
        assert self._run(self._h.registry.highest_number()) == self._highest
        for orphan in self._orphans:
            self._run(raises(NotFound, self._h.registry.open(orphan.ref.number)))

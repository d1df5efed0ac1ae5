"""Which weights: one reference that spans, pins and fates share."""

import msgspec

from headrace.platform.records.delivery import ChainGroup

FULL, ADAPTER = "full", "adapter"
"""Kinds of versions: whole weights, or LoRA adapters over a version that holds whole ones."""
ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What an adapter's folder holds, in peft's format."""


class VersionRef(msgspec.Struct, frozen=True, order=True, omit_defaults=True, gc=False):
    """A committed policy version.

    `number` is unique in a run and never reused (P6); `lineage` names the fence under which it was committed, so that
    two versions of different branches cannot be taken for one another. `adapter_id` and `base_hash` are filled when
    the version is an adapter over a base.
    """

    policy_id: str
    number: int
    lineage: int = 0
    adapter_id: str = ""
    base_hash: str = ""

    def __str__(self) -> str:
        return f"{self.policy_id}@v{self.number}"


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens `[start, end)` of a turn's sampled tokens came from `version`."""

    version: VersionRef
    start: int
    end: int


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The durable statement that a version exists (P6, P8): written exclusively, last, and never changed.

    `batches` is B(w) of P14: learner batches applied along this version's lineage. `consumed` names every attempt
    that the commit consumed with its fate, and `episode_files` the stored files that hold their payloads; `groups`
    says what a ledger that lost them must know to deliver those attempts once more. `kind` is FULL or ADAPTER; an
    adapter's `ref` has the content hash of its base.
    """

    schema_version: int = msgspec.field(default_factory=lambda: 2)
    ref: VersionRef
    parent: int | None
    parent_hash: str
    fence: int
    kind: str
    content_hash: str
    batches: int
    path: str
    files: dict[str, str] = {}
    consumed: dict[str, str] = {}
    episode_files: tuple[str, ...] = ()
    groups: tuple[ChainGroup, ...] = ()
    created_at_s: float = 0.0

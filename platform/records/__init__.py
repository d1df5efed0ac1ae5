"""The records that cross processes and disks: frozen, typed, versioned. Everything else may import these.

They are trees, never graphs, so they opt out of cyclic garbage collection (`gc=False`): a worker holds hundreds of
thousands of them, and the collector would walk all of them again and again.
"""

from headrace.platform.records.arrays import F32, I32, U8, f32, i32
from headrace.platform.records.episode import (
    SCHEMA_VERSION,
    Budgets,
    Digests,
    Episode,
    InjectedFault,
    Provenance,
    Stamps,
)
from headrace.platform.records.generation import Generation, GenerationRequest, SamplingParams
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.message import (
    ContentPart,
    Cost,
    HashPair,
    Message,
    Observation,
    RewardComponent,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)
from headrace.platform.records.status import (
    ActionKind,
    CancelReason,
    DropReason,
    Fate,
    FaultOwner,
    FinishReason,
    Purpose,
    RewardKind,
    Role,
    SideEffectTier,
    Status,
    StopReason,
    UpdateMode,
)
from headrace.platform.records.tables import FateRow, LossMaskReason, MaskedSpan, Receipt, RewardRow
from headrace.platform.records.turn import TokenColumn, ToolCallRecord, Turn, View
from headrace.platform.records.versions import VersionManifest, VersionRef, VersionSpan

__all__ = [
    "F32",
    "I32",
    "SCHEMA_VERSION",
    "U8",
    "ActionKind",
    "AttemptId",
    "Budgets",
    "CancelReason",
    "ContentPart",
    "Cost",
    "Digests",
    "DropReason",
    "Episode",
    "Fate",
    "FateRow",
    "FaultOwner",
    "FinishReason",
    "Generation",
    "GenerationRequest",
    "HashPair",
    "InjectedFault",
    "LossMaskReason",
    "MaskedSpan",
    "Message",
    "Observation",
    "Provenance",
    "Purpose",
    "Receipt",
    "RewardComponent",
    "RewardKind",
    "RewardRow",
    "Role",
    "SamplingParams",
    "SideEffectTier",
    "Stamps",
    "Status",
    "StepResult",
    "StopReason",
    "Task",
    "TokenColumn",
    "ToolCall",
    "ToolCallRecord",
    "ToolSpec",
    "Turn",
    "UpdateMode",
    "VersionManifest",
    "VersionRef",
    "VersionSpan",
    "View",
    "f32",
    "i32",
]

"""The seams of headrace. Each has a fake, a conformance suite, and says here who owns what and how it fails.

`platform/testing/fakes` has the fakes and `platform/testing/conformance` the suites; both are product code, so that
whoever brings an environment, a scorer or an engine can run ours against it.
"""

from headrace.platform.contracts.boxes import (
    Audited,
    BoxLimits,
    CallVerdict,
    CommandResult,
    Sandbox,
    SandboxProvider,
    ToolGateway,
    ToolOutput,
    ToolResult,
    ToolSession,
)
from headrace.platform.contracts.delivery import (
    Clock,
    Ledger,
    VersionRegistry,
)
from headrace.platform.contracts.doors import (
    Answered,
    Asked,
    AskedSampling,
    Conversations,
    DoorState,
    FinishedEpisode,
    OpenedEpisode,
    RefusalCode,
)
from headrace.platform.contracts.inference import (
    InferenceEngine,
    TokenGenerator,
)
from headrace.platform.contracts.learning import (
    Algorithm,
    AlgorithmNeeds,
    LearnerBackend,
    ScoredEpisode,
)
from headrace.platform.contracts.tokens import (
    ParsedMessage,
    Renderer,
)
from headrace.platform.contracts.worlds import (
    Environment,
    MaybeAwaitable,
    Scorer,
    TaskSource,
)

__all__ = [
    "Algorithm",
    "AlgorithmNeeds",
    "Answered",
    "Asked",
    "AskedSampling",
    "Audited",
    "BoxLimits",
    "CallVerdict",
    "Clock",
    "CommandResult",
    "Conversations",
    "DoorState",
    "Environment",
    "FinishedEpisode",
    "InferenceEngine",
    "LearnerBackend",
    "Ledger",
    "MaybeAwaitable",
    "OpenedEpisode",
    "ParsedMessage",
    "RefusalCode",
    "Renderer",
    "Sandbox",
    "SandboxProvider",
    "ScoredEpisode",
    "Scorer",
    "TaskSource",
    "TokenGenerator",
    "ToolGateway",
    "ToolOutput",
    "ToolResult",
    "ToolSession",
    "VersionRegistry",
]

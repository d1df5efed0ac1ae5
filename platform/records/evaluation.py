"""An evaluation: one version on a fixed list of tasks and seeds, episode by episode, so that two can be compared."""

import msgspec

from headrace.platform.records.permissions import UNSAID, Safety
from headrace.platform.records.status import FaultOwner, Status


class EpisodeOutcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One evaluated episode. `score` is None when it says nothing about the policy; `fault` says what broke.

    `injected_faults` counts those that were put in on purpose; `safety` is what the gateway counted.

    `environment`, `task_id`, `seed` (of the world) and `sample` (0-based, within the task) say what was played:
    outcomes of two evaluations that agree in them are a pair.
    """

    episode_id: str
    environment: str
    task_id: str
    seed: int
    sample: int
    score: float | None
    status: Status
    fault_owner: FaultOwner
    turns: int
    sampled_tokens: int
    duration_s: float
    tool_s: float
    fault: str = ""
    injected_faults: int = 0
    safety: Safety = UNSAID


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was measured. `model` is the folder or the run that the weights came from; `version` is None for a folder.

    `digests` names what besides weights decides the result (recipe, code, renderer), to tell whether two evaluations
    measured the same thing.
    """

    schema_version: int = msgspec.field(default_factory=lambda: 1)
    name: str
    run: str
    model: str
    version: int | None
    split: str
    tasks: int
    samples: int
    created_at_s: float
    digests: dict[str, str] = {}
    outcomes: tuple[EpisodeOutcome, ...] = ()

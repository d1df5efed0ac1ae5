"""Who plays the episodes."""

from pydantic import Field

from headrace.platform.config.base import StrictModel
from headrace.platform.records.status import UpdateMode


class RolloutConfig(StrictModel):
    """Rollout workers and how much each plays at once."""

    workers: int = Field(1, ge=1)
    max_episodes: int = Field(256, ge=1)
    """Episodes that a worker plays at once."""
    update_mode: UpdateMode = UpdateMode.STICKY
    """When an episode may meet new weights."""

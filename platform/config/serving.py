"""The inference pool."""

from typing import Literal

from pydantic import Field

from headrace.platform.config.base import StrictModel


class ServingConfig(StrictModel):
    """How many engines, and what each may hold."""

    engine: Literal["torch"] = "torch"
    replicas: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    """CPU threads for tensor work, per replica."""
    max_sessions: int = Field(256, ge=1)
    """Episodes whose keys and values a replica keeps at once; further requests wait."""
    max_batch: int = Field(128, ge=1)
    """Requests decoded together."""
    keep_versions: int = Field(0, ge=0)
    """Newest versions kept loaded; older ones stay while an episode uses them. 0 keeps all that the lag limit allows,
    `queue.max_lag` + 1, so that an admitted group finds its version however late its first request comes."""
    request_deadline_s: float = Field(60.0, gt=0)
    """How long one generation may take."""
    start_deadline_s: float = Field(120.0, gt=0)
    """How long a replica may take to come up."""

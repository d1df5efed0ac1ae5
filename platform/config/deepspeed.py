"""How the DeepSpeed backend shares a learner's state among its ranks."""

from typing import Literal

from pydantic import Field

from headrace.platform.config.base import StrictModel


class DeepspeedConfig(StrictModel):
    """What each rank holds a part of, and how long the others wait for it."""

    stage: Literal[0, 1, 2, 3] = 2
    """ZeRO. 0: every rank has all. 1: parts of the optimizer's state. 2: of gradients too. 3: of weights too."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the memory of the host, and step there; not with stage 0."""
    persist_below: int = Field(100_000, ge=0)
    """Stage 3 keeps tensors of at most so many elements whole on every rank."""
    deadline_s: float = Field(120.0, gt=0)
    """How long the ranks may take over one call, such as a learner step, before they count as hung."""

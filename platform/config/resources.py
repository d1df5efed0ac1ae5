"""What the parts of a run need of a cluster, and where they may go."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from headrace.platform.config.base import StrictModel

NodeLabel = Annotated[str, StringConstraints(pattern=r"^(|[A-Za-z0-9][\w./-]*=[\w.-]+)$")]
"""`key=value` of a Ray node, as in `ray start --labels key=value`; empty: any node."""


class LearnerResources(StrictModel):
    """For each of the learner's ranks (`learner.ranks`)."""

    cpus: float = Field(1.0, gt=0)
    gpus: int = Field(0, ge=0)
    pool: NodeLabel = ""
    """Only nodes with this label."""


class ReplicaResources(StrictModel):
    """For each replica (`serving.replicas`). Its shards lie on one node."""

    cpus: float = Field(1.0, gt=0)
    """For the whole replica."""
    gpus: int = Field(0, ge=0, le=1)
    """For each shard."""
    tensor_parallel: int = Field(1, ge=1)
    """Shards of a replica; vLLM on GPUs only."""
    pool: NodeLabel = ""
    """Only nodes with this label."""


class WorkerResources(StrictModel):
    """For each rollout worker (`rollout.workers`)."""

    cpus: float = Field(1.0, gt=0)
    pool: NodeLabel = ""
    """Only nodes with this label."""


class ResourcesConfig(StrictModel):
    """Becomes Ray placement groups; a plan that no set of nodes can hold fails before anything starts (P23)."""

    learner: LearnerResources = LearnerResources()
    replica: ReplicaResources = ReplicaResources()
    worker: WorkerResources = WorkerResources()
    layout: Literal["apart", "colocated"] = "apart"
    """`colocated`: each GPU holds one rank of the learner and one shard of a replica."""
    learner_share: float = Field(0.5, gt=0, lt=1)
    """The learner's part of each GPU where they are colocated."""

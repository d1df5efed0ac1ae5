"""The inference pool."""

from typing import Any, Literal

from pydantic import Field

from headrace.platform.config.base import StrictModel

VLLM_START_S = 300.0
"""vLLM may take so long to start, whatever `start_deadline_s` says."""


class VllmConfig(StrictModel):
    """What only vLLM needs to know. The rest of `serving` holds for it too."""

    kv_cache_mib: int = Field(256, ge=1)
    """Memory for keys and values on a CPU. On GPUs `gpu_memory_utilization` decides."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """`auto`: float32 on a CPU, bfloat16 on GPUs."""
    adapters: int = Field(0, ge=0)
    """LoRA adapters held at once, each a version over one base. 0: versions are full weights, one at a time."""
    max_lora_rank: int = Field(16, ge=1)
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments for vLLM's AsyncEngineArgs, by their names there."""


class ServingConfig(StrictModel):
    """How many engines, and what each may hold."""

    engine: Literal["torch", "vllm"] = "torch"
    """`torch` is light and holds several versions at once; `vllm` is the fast one (`headrace[vllm]`)."""
    vllm: VllmConfig = VllmConfig()
    replicas: int = Field(1, ge=1)
    threads: int = Field(1, ge=1)
    """CPU threads for tensor work, per replica."""
    max_sessions: int = Field(256, ge=1)
    """Episodes whose keys and values a replica keeps at once; further requests wait."""
    max_batch: int = Field(128, ge=1)
    """Requests decoded together."""
    drain: Literal["forbidden", "allowed"] = "forbidden"
    """Whether a pool that can hold one version only, with `rollout.update_mode=sticky`, may let its episodes run out
    before each update; nothing is sampled meanwhile, and the run reports it as `bubble_s` (P22)."""
    transport: Literal["file", "nccl"] = "file"
    """How weights reach a replica: from the version registry through a hash-checked cache of the node, or from the
    learner's GPUs straight to vLLM's."""
    keep_versions: int = Field(0, ge=0)
    """Newest versions kept loaded; older ones stay while an episode uses them. 0 keeps all that the lag limit allows,
    `queue.max_lag` + 1, so that an admitted group finds its version however late its first request comes."""
    request_deadline_s: float = Field(60.0, gt=0)
    """How long one generation may take."""
    start_deadline_s: float = Field(120.0, gt=0)
    """How long a replica may take to come up; vLLM takes at least 300."""
    control_deadline_s: float = Field(120.0, gt=0)
    """How long loading or retiring a version may take."""
    reconnect_s: float = Field(10.0, gt=0)
    """How long what was asked for over a lost connection waits for the next one (P24); dialling goes on after that."""
    drain_grace_s: float = Field(1.0, ge=0)
    """How long a replica that drains still takes sessions of groups that were admitted before; at least 10 where an
    environment has to get a sandbox or a host first."""

    @property
    def longest_start_s(self) -> float:
        """How long nothing may be sampled because a replica is started again."""
        return max(self.start_deadline_s, VLLM_START_S) + self.control_deadline_s if self.engine == "vllm" else 0.0

"""vLLM's executor for devices that Ray holds: the workers are Ray actors in the placement group of the replica.

Used where the environment names bundles, as it does for a replica that shares its devices with a learner. Apart from
`vllm_executor`, for it imports Ray.
"""

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from headrace.serving.vllm_process import end_with_parent


class RayDevices(RayExecutorV2):  # type: ignore[misc, unused-ignore]
    """One Ray actor a device."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()

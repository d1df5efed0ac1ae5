"""Weights from the learner straight to vLLM's workers: what the two say to one another, and what becomes of a failure.

The NCCL in between needs GPUs; here the sender calls what vLLM's trainer side calls, in its order.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.deploy.weight_offer import offered_at
from headrace.platform.errors import DeadlineExceeded, EngineError
from headrace.serving.vllm_nccl import NcclWeights
from headrace.serving.weight_link import Call, WeightOffer, fetch

CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
TOKEN, FOLDER, LONG_S = "secret", "f0001-v000003", 5.0


class Sender:
    """A `Send` with the calls of a whole transfer."""

    def __init__(self, fails: str = "") -> None:
        self.taken, self.shards, self.fails = 0, 0, fails

    def take_up(self) -> None:
        self.taken += 1

    def __call__(self, shards: int, perform) -> None:
        self.shards = shards
        for name in CALLS:
            if name == self.fails:
                raise RuntimeError("NCCL has lost a peer")
            perform(Call(name, {"names": ["head"]} if name == "update_weights" else {}))


class Workers:
    """Behind the rpc of a replica."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, dict]] = []
        self.fails = fails

    async def __call__(self, method: str, **arguments) -> None:
        self.calls.append((method, arguments))
        if method == self.fails:
            raise ValueError("no such tensor")


@asynccontextmanager
async def offered(sender, deadline_s: float = LONG_S):
    offer = WeightOffer(TOKEN, sender, deadline_s=deadline_s)
    address = await offer.start("127.0.0.1")
    await offer.offer(FOLDER, getattr(sender, "take_up", lambda: None))
    try:
        yield address
    finally:
        await offer.close()


async def test_the_learner_calls_and_the_replica_performs():
    sender, workers = Sender(), Workers()
    async with offered(sender) as address:
        assert await fetch(address, TOKEN, FOLDER, 4, workers, LONG_S)
    assert [name for name, _ in workers.calls] == list(CALLS)
    assert workers.calls[2][1] == {"names": ["head"]}
    assert (sender.taken, sender.shards) == (1, 4)


@pytest.mark.parametrize(("token", "folder"), [(TOKEN, "f0001-v000002"), ("guessed", FOLDER)])
async def test_nothing_is_changed_for_another_version_or_token(token: str, folder: str):
    workers = Workers()
    async with offered(Sender()) as address:
        assert not await fetch(address, token, folder, 1, workers, LONG_S)
    assert workers.calls == []
    assert not await fetch(address, TOKEN, FOLDER, 1, workers, LONG_S), "nobody listens there any more"


@pytest.mark.parametrize("fails", CALLS)
@pytest.mark.parametrize("who", ["sender", "workers"])
async def test_what_fails_half_way_is_never_taken_for_whole(fails: str, who: str):  # case S4
    sender, workers = Sender(fails if who == "sender" else ""), Workers(fails if who == "workers" else "")
    async with offered(sender) as address:
        with pytest.raises(EngineError, match="NCCL has lost a peer" if who == "sender" else "no such tensor"):
            await fetch(address, TOKEN, FOLDER, 1, workers, LONG_S)


async def test_a_worker_that_hangs_is_ended_by_the_deadline():  # case X8
    async def hangs(method: str, **arguments) -> None:
        await asyncio.Event().wait()

    async with offered(Sender()) as address:
        with pytest.raises(DeadlineExceeded):
            await fetch(address, TOKEN, FOLDER, 1, hangs, 0.2)


async def test_a_learner_that_dies_half_way_is_an_error():
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"type":"call","method":"start_weight_update"}\n')
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    with pytest.raises(EngineError, match="lost"):
        await fetch(server.sockets[0].getsockname()[:2], TOKEN, FOLDER, 1, Workers(), LONG_S)
    server.close()
    await server.wait_closed()


async def test_the_files_are_read_where_the_learner_has_another_version(tmp_path):
    workers = Workers()
    async with offered(Sender()) as address:
        weights = NcclWeights(lambda: address, TOKEN, 1, LONG_S)
        await weights.update(workers, f"/versions/{FOLDER}")
        await weights.update(workers, "/versions/f0001-v000002")
    await NcclWeights(lambda: offered_at(str(tmp_path)), TOKEN, 1, LONG_S).update(workers, "/versions/first")
    names = [name for name, _ in workers.calls]
    assert names == [*CALLS, "take_up_weights", "take_up_weights"]
    assert workers.calls[-1][1] == {"weights_path": "/versions/first"}

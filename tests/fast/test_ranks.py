"""Learner ranks compare what they are about to train on before any of them steps (P13), over real gloo processes."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from headrace.platform.errors import RunFailed
from headrace.trainer.ranks import agree, alone, over_gloo, step_digest

DEADLINE_S = 2.0


def test_the_digest_depends_on_ids_order_parent_and_step():
    base = step_digest(["a", "b"], 3, 7)
    assert base == step_digest(["a", "b"], 3, 7)
    assert len(base) == 64
    others = [(["b", "a"], 3, 7), (["a"], 3, 7), (["ab"], 3, 7), (["a", "b"], 4, 7), (["a", "b"], 3, 8)]
    assert len({base, *(step_digest(*other) for other in others)}) == 6


def test_a_single_rank_agrees_with_itself():
    agree(step_digest(["a"], 0, 1), alone)
    assert over_gloo(1.0) is alone


def test_a_mismatch_names_the_ranks():
    """P13"""
    with pytest.raises(RunFailed, match=r"ranks \[1, 3\] are about to take another step.*digest aaaa here, bbbb, cccc"):
        agree("aaaa", lambda mine: [mine, "bbbb", mine, "cccc"])


def test_a_lost_rank_is_told_as_such():
    """P13"""

    def gather(digest: str) -> list[str]:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RunFailed, match="a learner rank is lost; the weights are as before: Connection closed"):
        agree("aaaa", gather)


def try_to_agree(digest: str, gather) -> tuple[str, float]:
    began = time.monotonic()
    try:
        agree(digest, gather)
    except RunFailed as error:
        return str(error), time.monotonic() - began
    return "agreed", time.monotonic() - began


def be_a_rank(rank: int, store: str, pipe) -> None:
    """Equal digests, then different ones, then a silent rank 1, then one that is killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    gather = over_gloo(DEADLINE_S)
    pipe.send(try_to_agree(step_digest(["a", "b"], 0, 1), gather))
    pipe.send(try_to_agree(step_digest(["a", "b"], 0, 2 + rank), gather))
    gather = over_gloo(DEADLINE_S)
    if rank == 0:
        pipe.send(try_to_agree(step_digest(["a"], 0, 3), gather))
    gather = over_gloo(60.0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(try_to_agree(step_digest(["a"], 0, 3), gather))


def test_two_processes_agree_or_both_refuse_and_a_lost_one_is_noticed_in_time(tmp_path):
    """P13"""
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(2)), strict=True)
    ranks = [context.Process(target=be_a_rank, args=(rank, str(tmp_path / "store"), theirs[rank])) for rank in (0, 1)]
    for rank in ranks:
        rank.start()

    def told(rank: int) -> tuple[str, float]:
        assert ours[rank].poll(60), f"rank {rank} says nothing"
        return ours[rank].recv()

    try:
        assert [told(rank)[0] for rank in (0, 1)] == ["agreed", "agreed"]
        assert told(0)[0].startswith("learner ranks [1] are about to take another step")
        assert told(1)[0].startswith("learner ranks [0] are about to take another step")
        silent, after_s = told(0)
        assert silent.startswith("a learner rank is lost")
        assert DEADLINE_S / 2 < after_s < DEADLINE_S + 10
        killed, after_s = told(0)
        assert killed.startswith("a learner rank is lost")
        assert after_s < 30
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    assert ranks[1].exitcode == -signal.SIGKILL

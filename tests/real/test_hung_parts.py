"""Parts that stop without dying, with SIGSTOP: nobody waits for ever, and what was lost by it is done again."""

import asyncio
import contextlib
import os
import re
import signal
import time

import psutil
import pytest
from test_ray_restarts import InTurn, Killing, assert_unharmed, killing
from test_ray_runtime import carry, small

from headrace.deploy.ray_launches import Launches
from headrace.platform.errors import RunFailed
from headrace.platform.store.events import Events, RunEvent

pytestmark = pytest.mark.timeout(240)
ANSWER_S = 8.0
"""What stands for the minute that a part may take to answer."""
GONE_S = 20.0
NOT_LEASED = r"group \d+ is not leased to fence \d+"
RAN_OUT = r"the leases of groups \[.+\] ran out before they were committed"


class Stopping(InTurn):
    """Sends its victims SIGSTOP instead of SIGKILL."""

    sends = signal.SIGSTOP

    def __init__(self, context):
        super().__init__(context)
        self._parts = Launches(self._supervision, control_deadline_s=ANSWER_S)


def causes(context, part: str) -> list[str]:
    """Why that part was started again, each time."""
    events = Events(context.root, time.time).read()
    return [each["cause"] for each in events if each["event"] == RunEvent.PART_DIED and each["part"] == part]


async def gone(pid: int) -> bool:
    """Whether the process ends within GONE_S."""
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, GONE_S)
    return not psutil.pid_exists(pid)


async def test_parts_that_hang_come_again(ray_session, lookup_model, tmp_path):
    """Every kind of part, one after the other."""
    config = small(lookup_model, tmp_path, "learner.steps=7", "learner.checkpoint_every=1")
    parts = ("rollout-0", "replica-0", "learner")
    hanging = killing(of=Stopping, pids=[], turns=dict(zip((1, 3, 5), parts, strict=True)))
    summary, context = await carry(config, hanging)
    assert not hanging.turns and summary["learner_steps"] == 7
    assert_unharmed(summary, context, dict.fromkeys(parts, 1))
    for part, pid in zip(parts, hanging.pids, strict=True):
        (cause,) = causes(context, part)
        assert re.search(rf"\({part}\) took too long: no answer within {ANSWER_S:g} s", cause)
        assert await gone(pid), "a part that wakes up later must not meet the one that does its work"


# --- a learner that was away for longer than its leases (P7, P12) -----------------------------------------------------


class Lapsing(Killing):
    """Takes the learner's groups back, as the server does when their leases run out.

    Each time that step `at` was reported, or only the first time.
    """

    again = False

    async def step(self):
        report = await super().step()
        self.reported.append(report.step)
        if report.step == self.at and (self.again or self.reported.count(self.at) == 1):
            await self.lapse()
        return report

    async def lapse(self):
        stats = await self._ledger.stats()
        assert stats.groups_leased, "the step is not published"
        await self._ledger.extend(stats.fence, [], exactly=True)


class Freezing(Lapsing):
    """Stops the learner in the middle of a step until its leases have run out, and lets it go on then."""

    async def lapse(self):
        pid = await self.pid_of("learner")
        type(self).freezing = asyncio.create_task(self.freeze(pid))

    async def freeze(self, pid: int):
        ledger, lapsed = self._ledger, False
        while not lapsed:
            while not (await ledger.stats()).groups_leased:  # noqa: ASYNC110 - the learner tells nobody
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            await ledger.stats()  # by the next call the server has read what the learner had sent before
            stats = await ledger.stats()
            if lapsed := stats.groups_leased > 0:
                await ledger.extend(stats.fence, [], exactly=True)
            os.kill(pid, signal.SIGCONT)


def lapsing(of: type[Lapsing], at: int, **changes) -> type[Lapsing]:
    return type("Lapsing", (of,), {"at": at, "reported": [], **changes})


async def test_a_learner_that_was_frozen_beyond_its_leases(ray_session, lookup_model, tmp_path):
    """P7: its commit is refused, and the next learner goes on from the checkpoint."""
    config = small(lookup_model, tmp_path, "learner.steps=7", "learner.checkpoint_every=3")
    freezing = lapsing(Freezing, 4)
    summary, context = await carry(config, freezing)
    await freezing.freezing
    assert freezing.reported.count(4) == 2, "the checkpoint is that of step 3"
    assert summary["learner_steps"] == freezing.reported[-1] == 7
    assert_unharmed(summary, context, {"learner": 1})
    (cause,) = causes(context, "learner")
    assert re.fullmatch(rf"version \d+ was not accepted: {NOT_LEASED}", cause)


async def test_leases_that_ran_out_between_two_steps(ray_session, lookup_model, tmp_path):
    """P1: no group of an unpublished step is trained once more on top of it."""
    config = small(lookup_model, tmp_path, "learner.steps=6", "learner.publish_every=2", "learner.checkpoint_every=1")
    losing = lapsing(Lapsing, 3)
    summary, context = await carry(config, losing)
    assert losing.reported == [1, 2, 3, 3, 4, 5, 6]
    assert_unharmed(summary, context, {"learner": 1})
    (cause,) = causes(context, "learner")
    assert re.search(f"{RAN_OUT}|{NOT_LEASED}", cause), "whether or not it was given one of them again"


async def test_leases_that_run_out_again_and_again(ray_session, lookup_model, tmp_path):
    changes = ("learner.steps=6", "learner.publish_every=2", "learner.checkpoint_every=1", "runtime.max_restarts=1")
    cause = f"learner died 2 times without a learner step in between; the last time: .*({RAN_OUT}|{NOT_LEASED})"
    with pytest.raises(RunFailed, match=cause):
        await carry(small(lookup_model, tmp_path, *changes), lapsing(Lapsing, 3, again=True))

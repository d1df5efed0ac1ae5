"""Ranks of a learner as Ray actors: a rank that is killed costs a step and never the run (P13)."""

import os
import signal
import time
from typing import Any, ClassVar

import pytest
from test_ray_restarts import assert_unharmed, happened
from test_ray_runtime import carry, small

from headrace.deploy.runtime_ray import RayRuntime
from headrace.platform.store.events import Events, RunEvent

pytestmark = pytest.mark.timeout(400)
RANKED = ("learner.backend=deepspeed", "learner.ranks=2", "learner.deepspeed.stage=3", "learner.checkpoint_every=2")


class Striking(RayRuntime):
    """Kills rank 1 of the learner after a learner step, once."""

    strikes: ClassVar[list[int]] = [3]

    async def step(self) -> Any:
        report = await super().step()
        if report.step in self.strikes:
            self.strikes.remove(report.step)
            handle = (await self.ranks())[1]
            os.kill(await handle.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
        return report

    async def ranks(self) -> list[Any]:
        def of(actor: Any) -> Any:
            return actor.__ray_call__.remote(lambda learner: list(learner._learner._backend._ranks.handles))

        return await self._parts.learner.ask("asking", of)


def cause_of_death(context: Any) -> str:
    events = Events(context.root, time.time).read()
    (cause,) = [each["cause"] for each in events if each["event"] == RunEvent.PART_DIED]
    return cause


async def test_a_killed_rank_aborts_the_step_and_the_run_resumes(ray_session, lookup_model, tmp_path):
    """P13, P6. Step 3 is done when the rank is killed, and is done again from the checkpoint of version 2."""
    summary, context = await carry(small(lookup_model, tmp_path, *RANKED), Striking)
    assert not Striking.strikes and summary["learner_steps"] == 4
    assert_unharmed(summary, context, {"learner": 1})
    assert cause_of_death(context).startswith("learner rank 1 died: The actor died unexpectedly")
    assert happened(context, RunEvent.PART_RESTARTED) == ["learner"]

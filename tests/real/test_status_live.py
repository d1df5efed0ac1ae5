"""`headrace status RUN --json` beside a run that goes on: it names the part that waits, for what, and since when."""

import asyncio
import os
import signal
import time

import pytest
from command_line import last_json, run
from test_ray_runtime import carry, small

from headrace.deploy.runtime_ray import RayRuntime

pytestmark = pytest.mark.timeout(240)
WAIT_S = 90.0


class Watched(RayRuntime):
    """Looks at the run twice: before anybody plays, and while the server does not answer."""

    async def start_rollouts(self):
        """`step` does it, as soon as the learner is seen to wait."""

    async def step(self):
        if "no rollouts" in self.seen:
            return await super().step()
        began_s = time.time()
        stepping = asyncio.ensure_future(super().step())
        try:
            self.seen["no rollouts"] = await self.waits("learner", "a batch of 4 groups", began_s)
            await super().start_rollouts()
            report = await stepping
        finally:
            stepping.cancel()
        began_s = time.time()
        os.kill(self._server.pid, signal.SIGSTOP)
        try:
            self.seen["no server"] = await self.waits("rollout-0", "the ledger's server", began_s)
        finally:
            os.kill(self._server.pid, signal.SIGCONT)
        return report

    async def waits(self, part: str, waiting_for: str, began_s: float):
        """The status once that part waits for that; asked twice, so that the time can be seen to go on."""
        first = await self.status_when(lambda parts: parts[part]["waiting_for"] == waiting_for)
        since_s, told_s = first[part]["for_s"], time.time()
        second = await self.status_when(lambda parts: parts[part]["for_s"] > since_s)
        assert second[part]["waiting_for"] == waiting_for
        assert 0.0 <= since_s <= told_s - began_s, "it does not wait for longer than there is a reason"
        assert second[part]["for_s"] <= time.time() - began_s
        return second

    async def status_when(self, holds):
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            given = ("status", self._context.run, "--runs-dir", str(self.folder), "--json")
            code, out, err = await asyncio.to_thread(run, self.folder, *given, timeout_s=WAIT_S)
            assert code == 0, err[-3000:]
            status = last_json(out)
            assert status["state"] == "running"
            parts = {each["part"]: each for each in status["parts"]}
            if holds(parts):
                return parts
        return pytest.fail(f"waited {WAIT_S:g} s in vain; the last words: {parts}")


async def test_a_part_that_waits_says_for_what_and_since_when(ray_session, lookup_model, tmp_path):
    watched = type("Watched", (Watched,), {"seen": {}, "folder": tmp_path})
    summary, _ = await carry(small(lookup_model, tmp_path, "learner.steps=3"), watched)
    assert summary["learner_steps"] == 3 and summary["equation_holds"]
    before = watched.seen["no rollouts"]
    assert set(before) == {"driver", "learner", "replica-0", "rollout-0"}
    assert (before["learner"]["state"], before["learner"]["detail"]["ready"]) == ("step 1", 0)
    assert not any(part["silent"] for part in before.values())
    away = watched.seen["no server"]
    assert away["rollout-0"]["detail"]["ledger"].startswith("waiting for the ledger: ")
    assert (away["learner"]["state"], away["learner"]["waiting_for"]) == ("step 1 done", "the next step")

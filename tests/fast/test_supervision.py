"""Parts that die: how often they are started again, who waits for it, and when the run ends by name."""

import asyncio

import pytest

from headrace.deploy.supervision import Supervised, Supervision
from headrace.platform.errors import DeadlineExceeded, PartDied, RunFailed
from headrace.platform.store.events import RunEvent


class Told(list):
    def __call__(self, kind, **detail):
        self.append((kind, detail))


class FakePart:
    """What stands behind a handle."""

    def __init__(self, launch: int) -> None:
        self.launch = launch
        self.dead = False
        self.discarded = 0

    async def answer(self) -> int:
        if self.dead:
            raise PartDied(f"launch {self.launch} is gone")
        return self.launch


class Workshop:
    """Makes fake parts; `stillborn` of the next ones die while they are brought up."""

    def __init__(self, max_restarts: int = 3) -> None:
        self.told = Told()
        self.supervision = Supervision(max_restarts, self.told)
        self.made: list[FakePart] = []
        self.stillborn = 0
        self.may_come_up = asyncio.Event()
        self.may_come_up.set()
        self.coming_up = asyncio.Event()
        self.part = Supervised("rollout-0", self.supervision, self._spawn, self._bring_up, self._discard)

    def _spawn(self, launch: int) -> FakePart:
        self.made.append(FakePart(launch))
        return self.made[-1]

    async def _bring_up(self, handle: FakePart) -> None:
        self.coming_up.set()
        await self.may_come_up.wait()
        if self.stillborn:
            self.stillborn -= 1
            raise PartDied(f"launch {handle.launch} never came up")

    @staticmethod
    def _discard(handle: FakePart) -> None:
        handle.dead = True
        handle.discarded += 1

    def kill(self) -> None:
        self.made[-1].dead = True


class TestCounting:
    def test_the_last_death_too_many_ends_the_run_by_name(self):  # case E9
        supervision = Supervision(3, Told())
        for _ in range(3):
            supervision.died("rollout-0", "killed")
        with pytest.raises(RunFailed) as failure:
            supervision.died("rollout-0", "out of memory")
        assert str(failure.value) == (
            "rollout-0 died 4 times without a learner step in between; the last time: out of memory"
        )
        assert supervision.restarts == {"rollout-0": 3}

    def test_without_restarts_the_first_death_ends_it(self):  # case E9
        with pytest.raises(RunFailed, match=r"^learner died: killed$"):
            Supervision(0, Told()).died("learner", "killed")

    def test_parts_are_counted_apart(self):
        supervision = Supervision(1, Told())
        supervision.died("replica-0", "killed")
        supervision.died("replica-1", "killed")
        assert supervision.restarts == {"replica-0": 1, "replica-1": 1}

    def test_a_new_learner_step_is_progress(self):
        supervision = Supervision(1, Told())
        for step in range(1, 6):
            supervision.died("learner", "killed")
            supervision.reached(step)
        assert supervision.restarts == {"learner": 5}

    def test_steps_done_again_after_a_resume_are_none(self):
        """A learner that dies at step 7 whenever it comes from the checkpoint of step 5."""
        supervision = Supervision(2, Told())
        supervision.reached(6)
        with pytest.raises(RunFailed, match="3 times"):
            for _ in range(3):
                supervision.died("learner", "killed")
                supervision.reached(6)

    def test_deaths_and_restarts_are_told(self):
        told = Told()
        supervision = Supervision(1, told)
        supervision.died("server", "killed")
        supervision.is_back("server")
        assert told == [
            (RunEvent.PART_DIED, {"part": "server", "cause": "killed"}),
            (RunEvent.PART_RESTARTED, {"part": "server"}),
        ]


class TestRestarting:
    async def test_a_question_is_repeated_to_the_next_launch(self):
        shop = Workshop()
        assert await shop.part.ask(FakePart.answer) == 1
        shop.kill()
        assert await shop.part.ask(FakePart.answer) == 2
        assert shop.part.launch == 2
        assert [kind for kind, _ in shop.told] == [RunEvent.PART_DIED, RunEvent.PART_RESTARTED]

    async def test_the_dead_one_is_made_sure_of(self):
        """It may live on beyond a cut in the network: a second one beside it would be one too many."""
        shop = Workshop()
        shop.kill()
        await shop.part.ask(FakePart.answer)
        assert [made.discarded for made in shop.made] == [1, 0]

    async def test_many_who_find_it_dead_wait_for_one_restart(self):
        shop = Workshop(max_restarts=1)
        shop.kill()
        shop.may_come_up.clear()
        asking = [asyncio.create_task(shop.part.ask(FakePart.answer)) for _ in range(8)]
        await shop.coming_up.wait()
        asking.append(asyncio.create_task(shop.part.ask(FakePart.answer)))
        shop.may_come_up.set()
        assert await asyncio.gather(*asking) == [2] * 9
        assert len(shop.made) == 2

    async def test_what_must_not_be_repeated_is_told_that_it_died(self):
        shop = Workshop()
        shop.kill()
        with pytest.raises(PartDied, match="launch 1"):
            await shop.part.ask(FakePart.answer, "restart")
        assert await shop.part.ask(FakePart.answer, "restart") == 2

    async def test_left_alone_it_stays_dead(self):
        shop = Workshop()
        shop.kill()
        with pytest.raises(PartDied):
            await shop.part.ask(FakePart.answer, "leave")
        assert len(shop.made) == 1 and not shop.told

    async def test_deaths_while_it_comes_up_count(self):  # case E9
        shop = Workshop(max_restarts=3)
        shop.kill()
        shop.stillborn = 2
        assert await shop.part.ask(FakePart.answer) == 4
        assert [made.discarded for made in shop.made] == [1, 1, 1, 0]
        shop.kill()
        shop.stillborn = 9
        with pytest.raises(RunFailed, match=r"died 4 times .* launch 4 is gone"):
            await shop.part.ask(FakePart.answer)

    async def test_the_first_launch_may_be_stillborn_too(self):
        shop = Workshop()
        shop.stillborn = 1
        await shop.part.bring_up()
        assert shop.part.launch == 2

    async def test_given_up_is_given_up_for_everyone(self):  # case E9
        shop = Workshop(max_restarts=0)
        shop.kill()
        results = await asyncio.gather(*(shop.part.ask(FakePart.answer) for _ in range(3)), return_exceptions=True)
        with pytest.raises(RunFailed) as late:
            await shop.part.ask(FakePart.answer)
        assert {str(error) for error in (*results, late.value)} == {"rollout-0 died: launch 1 is gone"}
        assert len(shop.made) == 1

    async def test_an_error_while_it_comes_up_is_the_end(self):
        shop = Workshop()

        async def nowhere(handle: FakePart) -> None:
            raise DeadlineExceeded("no node had a free CPU")

        part = Supervised("learner", shop.supervision, FakePart, nowhere, shop._discard)
        part.handle.dead = True
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match="no node"):
                await part.ask(FakePart.answer)
        assert shop.supervision.restarts == {"learner": 1}

    async def test_making_way_is_no_death(self):
        shop = Workshop(max_restarts=0)
        await shop.part.replace(1)
        assert shop.part.launch == 2 and shop.made[0].discarded
        await shop.part.replace(1)
        assert shop.part.launch == 2, "somebody else has replaced that one already"
        assert not shop.supervision.restarts


class TestCancelling:
    async def test_a_restart_outlives_whoever_asked_for_it(self):
        shop = Workshop()
        shop.kill()
        shop.may_come_up.clear()
        asking = asyncio.create_task(shop.part.ask(FakePart.answer))
        await shop.coming_up.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        shop.may_come_up.set()
        assert await shop.part.ask(FakePart.answer) == 2
        assert len(shop.made) == 2

    async def test_an_abandoned_restart_leaves_nothing_behind(self):
        shop = Workshop()
        shop.kill()
        shop.may_come_up.clear()
        asking = asyncio.create_task(shop.part.ask(FakePart.answer))
        await shop.coming_up.wait()
        await shop.part.abandon_restart()
        with pytest.raises(PartDied, match="rollout-0 is dead"):
            await asking
        assert all(made.discarded for made in shop.made)

    async def test_closing_ends_the_present_one(self):
        shop = Workshop()
        await shop.part.close()
        assert shop.made[0].discarded == 1

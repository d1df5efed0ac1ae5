"""The page of wait cycles: each of P19 to P23 is there, and names tests that exist."""

import asyncio
import re
from pathlib import Path

from episode_kit import World
from worker_kit import SIZE, Bench

from headrace.platform.records.message import RewardComponent, StepResult
from headrace.platform.records.status import RewardKind

ROOT = Path(__file__).resolve().parents[2]
CYCLES = (ROOT / "docs/deadlocks.md").read_text().split("## Everything else")[0]
ROWS = [line.split("|")[1:-1] for line in CYCLES.splitlines() if line.startswith("| ")][1:]


def test_every_rule_has_a_cycle_and_every_cycle_a_test_that_exists():
    code = "\n".join(
        file.read_text() for folder in ("tests", "platform/testing") for file in (ROOT / folder).rglob("*.py")
    )
    assert {f"P{n}" for n in range(19, 24)} <= {rule.strip() for row in ROWS for rule in row[2].split(",")}
    for waits, _, _, tests in ROWS:
        names = re.findall(r"`(\w+)`", tests)
        assert names, f"no test tries this: {waits}"
        missing = [name for name in names if f"def {name}(" not in code]
        assert not missing, f"{missing} do not exist"


class _TogetherGrader:
    """Grades nobody before `needed` episodes are being graded at once."""

    version = "1"

    def __init__(self, needed: int) -> None:
        self.needed, self.grading = needed, 0
        self.all_there = asyncio.Event()
        self.worlds = []
        self.closed_then = 0

    async def score(self, task, episode):
        self.grading += 1
        if self.grading == self.needed:
            self.closed_then = sum(world.closed for world in self.worlds)
            self.all_there.set()
        await self.all_there.wait()
        return (RewardComponent(RewardKind.OUTCOME, float(episode.attempt_id.sample % 2)),)

    async def close(self):
        pass


async def test_graders_need_no_place(tmp_path, monkeypatch):
    """P21: every place is held by an episode that is being graded, and all of them are graded all the same."""
    places = 2 * SIZE
    grader = _TogetherGrader(places)
    worlds = lambda n: World(lambda _: StepResult(terminated=True))  # noqa: E731 - the graders give the reward
    bench = Bench(tmp_path, monkeypatch, worlds, max_episodes=places, scorer=grader)
    grader.worlds = bench.worlds
    await bench.publish()
    await bench.worker.start()
    await bench.until(lambda stats: stats.groups_ready >= 2)
    assert grader.closed_then >= places, "a graded episode holds no world"
    await bench.worker.stop()
    await bench.check_closed()

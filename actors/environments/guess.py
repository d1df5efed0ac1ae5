"""`guess`: find a hidden number from 1 to 100 in a few turns. A text-only world, and an example of one.

The guess is the last number of an answer that is in range; a wrong one is answered "higher" or "lower". The reward says
how close the best guess came, 1 for the number itself: even a weak model's episodes differ, so a group can learn.
"""

import random
import re
from collections.abc import Sequence

from headrace.actors.environments.base import ReplayedEnvironment
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import hash_value
from headrace.platform.records.message import Message, Observation, RewardComponent, StepResult, Task, ToolSpec
from headrace.platform.records.status import RewardKind, Role, Status
from headrace.platform.seeding import derive_seed

HIGHEST = 100
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,3}(?![0-9])")
_SHUFFLED = random.Random("guess-splits").sample(range(1, HIGHEST + 1), HIGHEST)
# Splits differ in the number: no task of one split occurs in another.
_NUMBERS = {"train": _SHUFFLED[:80], "dev": _SHUFFLED[80:90], "hidden": _SHUFFLED[90:]}


class GuessEnvironment(ReplayedEnvironment):
    """One session. `turns` is how many answers the model may give, readable or not."""

    name = "guess"
    version = "1"

    def __init__(self, turns: int = 2) -> None:
        super().__init__()
        if turns < 1:
            raise ConfigError(f"guess: turns must be at least 1, not {turns}")
        self._turns = turns
        self._number = 0
        self._said: list[int | None] = []

    def tools(self) -> Sequence[ToolSpec]:
        """See `Environment.tools`."""
        return ()

    def _fresh(self) -> "GuessEnvironment":
        return GuessEnvironment(self._turns)

    async def _reset(self, task: Task, seed: int) -> Observation:
        self._number, self._said = int(task.data["number"]), []
        opening = f"Guess my number from 1 to {HIGHEST}, in {self._turns} turns. Answer with a number and nothing else."
        return Observation((Message(Role.USER, opening),), hash_value([self._number]))

    async def _step(self, message: Message) -> StepResult:
        guess = next((n for n in reversed([*map(int, _NUMBER.findall(message.content))]) if 1 <= n <= HIGHEST), None)
        self._said.append(guess)
        status = Status.MODEL_INVALID_ACTION if guess is None else Status.OK
        state_hash = hash_value([self._number, self._said])
        if guess == self._number or len(self._said) == self._turns:
            reward = RewardComponent(RewardKind.OUTCOME, self._closeness())
            return StepResult(rewards=(reward,), terminated=True, status=status, state_hash=state_hash)
        way = "higher" if self._number > (guess or 0) else "lower"
        answer = f"It is {way}." if guess else f"Say a number from 1 to {HIGHEST} in digits, such as 50."
        return StepResult(messages=(Message(Role.USER, answer),), status=status, state_hash=state_hash)

    def _closeness(self) -> float:
        """Falls linearly with the distance of the best guess; 0 without one."""
        distances = [abs(guess - self._number) for guess in self._said if guess is not None]
        return 1.0 - min(distances) / HIGHEST if distances else 0.0


class GuessTasks:
    """An endless, seeded `TaskSource`. Raises ConfigError for a split other than "train", "dev" and "hidden"."""

    def __init__(self, split: str, seed: int) -> None:
        if split not in _NUMBERS:
            raise ConfigError(f"guess has no split {split!r}; known: {', '.join(_NUMBERS)}")
        self.split = split
        self.state = 0
        self._seed = seed

    def restore(self, state: int) -> None:
        """See `TaskSource.restore`."""
        self.state = state

    def next(self, n: int) -> Sequence[Task]:
        """See `TaskSource.next`."""
        tasks = [self._draw(self.state + offset) for offset in range(n)]
        self.state += n
        return tasks

    def _draw(self, position: int) -> Task:
        seed = derive_seed("guess", self._seed, self.split, position)
        number = random.Random(seed).choice(_NUMBERS[self.split])
        return Task(f"guess-{self.split}-{position}", "guess", data={"number": number}, split=self.split, seed=seed)

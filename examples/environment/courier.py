"""A courier fetches a parcel and brings it to a door before the battery is empty; a compass says where to go."""

import random
from itertools import permutations, product
from typing import Any

import headrace
from headrace import Message, Observation, Role, Status, StepResult, Task

SIZE = 4
MOVES = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
REWARDS = (1.0, 0.3, 0.0)  # by the number of stops that are left


def way(start: list[int], goal: list[int]) -> list[str]:
    """A shortest way."""
    east, north = goal[0] - start[0], goal[1] - start[1]
    return ["east" if east > 0 else "west"] * abs(east) + ["north" if north > 0 else "south"] * abs(north)


class Courier(headrace.ReplayedEnvironment):
    """One delivery; `spare` is how many steps more than the shortest way the battery lasts."""

    name, version = "courier", "1"

    def __init__(self, spare: int = 2) -> None:
        self._spare = spare

    @staticmethod
    def tasks(split: str, seed: int) -> list[dict[str, Any]]:
        """All ways to lay out a town, dealt out to the splits."""
        towns = [list(map(list, places)) for places in permutations(product(range(SIZE), repeat=2), 3)]
        random.Random(0).shuffle(towns)
        dealt = {"train": towns[:2600], "dev": towns[2600:3000], "hidden": towns[3000:]}
        return [dict(zip(("start", "parcel", "door"), town, strict=True)) for town in dealt[split]]

    @staticmethod
    def demonstrate(task: Task) -> list[Message]:
        """Assistant messages that play the task to its end; `headrace env check` plays them."""
        start, parcel, door = task.data["start"], task.data["parcel"], task.data["door"]
        return [Message(Role.ASSISTANT, word) for word in way(start, parcel) + way(parcel, door)]

    def tools(self) -> list[Any]:
        """None: it acts in words."""
        return []

    def _reset(self, task: Task, seed: int) -> Observation:
        self._at, self._stops = task.data["start"], [task.data["parcel"], task.data["door"]]
        self._battery = len(self.demonstrate(task)) + self._spare
        return Observation((self._compass(),), self._hash())

    def _step(self, message: Message) -> StepResult:
        move = MOVES.get(message.content)
        status = Status.OK if move else Status.MODEL_INVALID_ACTION
        self._at = [min(max(place + by, 0), SIZE - 1) for place, by in zip(self._at, move or (0, 0), strict=True)]
        self._battery -= 1
        if self._at == self._stops[0]:
            del self._stops[0]
        if self._stops and self._battery:
            return StepResult((self._compass(),), status=status, state_hash=self._hash())
        outcome = headrace.RewardComponent(headrace.RewardKind.OUTCOME, REWARDS[len(self._stops)])
        return StepResult(rewards=(outcome,), terminated=True, status=status, state_hash=self._hash())

    def _compass(self) -> Message:
        towards = dict.fromkeys(way(self._at, self._stops[0]))
        return Message(Role.USER, f"{'parcel' if len(self._stops) == 2 else 'door'}: {' '.join(towards)}")

    def _hash(self) -> Any:
        return headrace.hash_value([self._at, self._stops, self._battery])

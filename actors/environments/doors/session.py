"""What a tool may know of the episode it is called in, and how it says that the model made a mistake."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

from headrace.platform.errors import HeadraceError


class ToolError(HeadraceError, ValueError):
    """Raised by a tool for a mistake of the model: the message becomes the observation, and the episode goes on.

    Anything else that a tool raises is a fault of the environment, which ends the episode without a reward.
    """


@dataclass(kw_only=True, slots=True)
class Session:
    """One episode, as its tools see it: a parameter annotated `headrace.Session` gets it and is not shown to the model.

    Attributes:
        task: the row that is played; a copy of the episode's own.
        seed: the episode's seed.
        state: what tools remember between calls; part of the state hash as far as it is JSON.
        random: a generator seeded with `seed`.
    """

    task: dict[str, Any]
    seed: int
    state: dict[str, Any] = field(default_factory=dict)
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

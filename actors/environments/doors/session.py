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
    """One episode, as its tools see it: a parameter annotated `headrace.Session` (or `Session | None`) gets it
    and is not shown to the model.

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

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Refuse to be an argument, or a part of one, that a model could give."""
        from pydantic.errors import PydanticUserError

        raise PydanticUserError("headrace.Session can only be a parameter by itself, such as s: Session", code=None)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

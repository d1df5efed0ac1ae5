"""`learner.algorithm.name=branch`: how many members of a group branch off its first episode, and at how many steps."""

from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.platform.config.algorithm import AlgorithmOptions

POINTS, CONTINUATIONS = 2, 3


class BranchConfig(AlgorithmOptions):
    """Continuations from steps of an episode say what these steps were worth."""

    name: Literal["branch"] = "branch"
    points: int = Field(POINTS, ge=1)
    """States of the first episode of a group (its trunk) that others begin from, spread evenly over its turns. The
    reset is always one of them; 1 is that one alone, and equals `rloo`."""
    continuations: int = Field(CONTINUATIONS, ge=1)
    """Episodes that begin at each point."""
    group_size: int = Field(1 + POINTS * CONTINUATIONS, ge=2)
    """Always 1 + points * continuations, which it also is when left out."""

    @model_validator(mode="before")
    @classmethod
    def _as_many_as_play(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "group_size" in value:
            return value
        try:
            points, continuations = int(value.get("points", POINTS)), int(value.get("continuations", CONTINUATIONS))
        except (TypeError, ValueError):  # the fields say what is wrong with them
            return value
        return {**value, "group_size": 1 + points * continuations}

    @model_validator(mode="after")
    def _group_is_the_tree(self) -> "BranchConfig":
        needed = 1 + self.points * self.continuations
        if self.group_size != needed:
            raise ValueError(
                f"group_size={self.group_size}, but points={self.points} times continuations={self.continuations} and"
                f" the trunk are {needed} episodes; set learner.algorithm.group_size={needed}"
            )
        if self.returns.credit != "episode":
            raise ValueError("branch compares whole episodes; returns.credit=to_go is for rloo and reinforce")
        return self

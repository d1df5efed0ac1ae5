"""Faults that are put into episodes on purpose."""

from typing import Literal

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel

FaultKind = Literal[
    "timeout",
    "server_error",
    "kill_sandbox",
    "lost_reply",
    "duplicate_effect",
    "changed_page",
    "failed_reset",
]


class FaultConfig(StrictModel):
    """One kind of fault. Whether it strikes is drawn from the run's seed, the attempt and the step: the same run meets
    the same faults, a retry meets others. Each is recorded in its episode, and a replay puts it in again."""

    kind: FaultKind
    """`timeout`: the step is not done and fails after `seconds`, as one that outran its deadline. `server_error`: the
    answer says status 500 instead of what the world said. `changed_page`: the answer is another text. `kill_sandbox`:
    the box is killed before the step. `lost_reply`: the step is done, its reply is lost, and it is asked for again
    under the same key. `duplicate_effect`: the step is done twice. `failed_reset`: reset raises."""
    rate: float = Field(0.0, ge=0, le=1)
    """Chance at each step (of `failed_reset`: at each reset)."""
    steps: tuple[int, ...] = ()
    """Steps at which it strikes always, the first being 1, in every first attempt of a slot."""
    text: str = ""
    """What a changed page or a server error says; empty for a default."""
    seconds: float = Field(0.0, ge=0)
    """How long a `timeout` lasts before it fails."""

    @model_validator(mode="after")
    def _strikes(self) -> "FaultConfig":
        if not self.rate and not self.steps and self.kind != "failed_reset":
            raise ValueError("give a rate above 0 or steps, or the fault never strikes")
        if self.kind == "failed_reset" and (self.steps or not self.rate):
            raise ValueError("failed_reset has a rate above 0 and no steps: there is one reset")
        if any(step < 1 for step in self.steps):
            raise ValueError("steps are counted from 1")
        if self.text and self.kind not in ("server_error", "changed_page"):
            raise ValueError(f"{self.kind} says nothing: text is for server_error and changed_page")
        if self.seconds and self.kind != "timeout":
            raise ValueError(f"{self.kind} takes no time: seconds is for timeout")
        return self

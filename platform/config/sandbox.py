"""Where the tools of an environment run, and what they may use."""

from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel
from headrace.platform.contracts import BoxLimits

SandboxMode = Literal["docker", "bubblewrap", "landlock", "unsafe-process"]
MODES: tuple[SandboxMode, ...] = ("docker", "bubblewrap", "landlock", "unsafe-process")
"""From the strongest to none."""


class SandboxConfig(StrictModel):
    """One kind of box. `sandbox: bubblewrap` is short for `sandbox: {mode: bubblewrap}`."""

    mode: SandboxMode = "bubblewrap"
    """The weakest isolation that is accepted: this one where it works here, else a stronger one; nothing weaker ever
    starts. `unsafe-process` isolates nothing."""
    image: str = ""
    """Docker: the image, by name or digest. It must have been pulled or built; nothing is fetched."""
    workspace: str = ""
    """A folder whose files the workspace begins with; empty begins empty. It is never written."""
    network: bool = False
    """Whether commands may reach the network of this machine."""
    memory_mb: int = Field(512, ge=16)
    """MiB of memory of the whole box."""
    cpus: float = Field(1.0, gt=0)
    """Processors' worth of time; enforced where the machine has cgroups."""
    cpu_s: int = Field(600, ge=1)
    """Seconds of processor time of one process."""
    pids: int = Field(64, ge=4)
    """Processes and threads of the box."""
    file_mb: int = Field(64, ge=1)
    """MiB of one file."""
    disk_mb: int = Field(256, ge=1)
    """MiB of all that a box writes; beyond it the box is killed."""
    output_kb: int = Field(64, ge=1)
    """KiB of one command's output that are kept."""
    silence_s: float = Field(60.0, gt=0)
    """How long a command may say nothing."""
    max_boxes: int = Field(0, ge=0)
    """Boxes at once, for each rollout worker; 0: as many as it plays episodes. With fewer, episodes wait for one in
    their reset, under its deadline."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    def limits(self) -> BoxLimits:
        """The record form."""
        return BoxLimits(
            memory_mb=self.memory_mb,
            cpus=self.cpus,
            cpu_s=self.cpu_s,
            pids=self.pids,
            file_mb=self.file_mb,
            disk_mb=self.disk_mb,
            output_kb=self.output_kb,
            silence_s=self.silence_s,
        )

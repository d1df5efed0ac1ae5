"""Where tasks come from, how splits are kept apart, and which task comes next."""

import itertools
from typing import Any, Literal

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel

SPLITS = ("train", "dev", "hidden")


class TasksConfig(StrictModel):
    """A source of tasks. Rows of files become the `data` of tasks, column by column."""

    source: str = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, a folder of them, a folder of Hugging Face `datasets` (`save_to_disk`), a
    generator as `./file.py:Name` or `package.module:Name`, or `reasoning_gym:NAME`."""
    dev: str = ""
    """A source of its own for the dev split; empty takes a share of `source`."""
    hidden: str = ""
    """A source of its own for the hidden split; empty takes a share of `source`."""
    dev_share: float = Field(0.1, ge=0, lt=1)
    """Share of the rows of `source` that belong to the dev split, by a hash of their content."""
    hidden_share: float = Field(0.1, ge=0, lt=1)
    """Share of the rows of `source` that belong to the hidden split, by a hash of their content."""
    limit: int = Field(0, ge=0)
    """Use the first so many rows only; 0 uses all."""
    seeds: dict[Literal["train", "dev", "hidden"], tuple[int, int]] = Field(default_factory=dict)
    """Half-open ranges of seeds for generators, per split; they must not overlap. Give all three, or none: what a
    generator makes is then divided by the shares, and each split has seeds of its own."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator."""

    @model_validator(mode="after")
    def _splits_apart(self) -> "TasksConfig":
        if self.dev_share + self.hidden_share >= 1:
            raise ValueError("dev_share and hidden_share leave nothing to train on; together they must be below 1")
        ranges = sorted((start, end, split) for split, (start, end) in self.seeds.items())
        for start, end, split in ranges:
            if start < 0 or end <= start:
                raise ValueError(f"seeds.{split}=[{start}, {end}] is empty; give [FIRST, END) with 0 <= FIRST < END")
        for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
            if start < end:
                raise ValueError(
                    f"the seeds of {one} and {other} overlap ({start} is below {end}): evaluation must not see the"
                    " worlds of training; give each split a range of its own"
                )
        return self


class CurriculumConfig(StrictModel):
    """Which environment and task a group plays next."""

    kind: Literal["weighted", "uniform", "success_window"] = "weighted"
    """`weighted` mixes environments by their weights and walks through each one's tasks; `uniform` gives every
    environment the same share; `success_window` mixes by weight and prefers tasks that the policy sometimes solves."""
    low: float = Field(0.1, ge=0, le=1)
    """Tasks whose recent success lies between `low` and `high` are always played (success_window). Success is the mean
    score, each counted from 0 to 1: a reward above 1 is a task solved."""
    high: float = Field(0.9, ge=0, le=1)
    """See `low`."""
    floor: float = Field(0.1, gt=0, le=1)
    """How often, relative to the others, a task outside of the window is still played, so that it can come back."""
    level: str = ""
    """A key of the tasks' data, such as `difficulty`: success is then counted per value of it instead of per task."""
    memory: int = Field(32, ge=1)
    """Episodes per task or level that count as recent."""

    @model_validator(mode="after")
    def _window(self) -> "CurriculumConfig":
        if self.low >= self.high:
            raise ValueError(f"curriculum.low={self.low} must be below curriculum.high={self.high}")
        return self

"""Supervised stages that come before reinforcement learning."""

from pydantic import Field, model_validator

from headrace.platform.config.base import StrictModel


class SftStageConfig(StrictModel):
    """One stage: imitate demonstrations for a number of steps, or until a success is measured.

    They come from `data`, from `episodes`, or, where neither is given, from the environment's own demonstrator.
    """

    name: str
    data: str = ""
    """Chats as a `.jsonl` or `.parquet` file: rows with `messages`, and `tools` where there are any."""
    episodes: str = ""
    """A run root whose stored episodes are imitated: rejection sampling."""
    filter: str = "score >= 1"
    """Which of `episodes` are taken: comparisons over score, turns, tokens, version, environment and split, joined by
    `and`."""
    guess_share: float = Field(0.0, ge=0, le=1)
    """Share of traces in which the environment's demonstrator guesses at a random turn; 0 is the oracle."""
    until_success: float | None = Field(None, gt=0, le=1)
    """Stop as soon as sampled success reaches this; a stage that never does fails the run by name."""
    max_steps: int = Field(800, ge=1)
    """Optimizer steps at most (exactly, where `until_success` is not set)."""
    lr: float = Field(3e-3, gt=0)
    batch: int = Field(32, ge=1)
    """Traces per step."""
    warmup: int = Field(20, ge=0)
    """Steps of linear warm-up."""
    max_tokens: int = Field(2048, ge=8)
    """Longer traces are left out and counted."""
    measure_every: int = Field(25, ge=1)
    """Steps between two measurements of success."""
    measure_tasks: int = Field(64, ge=1)
    """Episodes per measurement."""

    @model_validator(mode="after")
    def _one_source(self) -> "SftStageConfig":
        if self.data and self.episodes:
            raise ValueError(f"stage {self.name!r} has both `data` and `episodes`; give one stage each")
        return self


class SftConfig(StrictModel):
    """The stages in order. Their result is cached by a hash of everything that it depends on."""

    stages: tuple[SftStageConfig, ...]
    cache_dir: str = ""
    """Where finished stages lie; empty means the user's cache folder."""
    threads: int = Field(1, ge=1)
    """CPU threads for tensor work."""

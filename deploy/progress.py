"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from headrace.deploy.base_model import SftStep


class RunState:
    """What is shown; the conductor fills it in."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.stage = "starting"
        self.began = time.monotonic()
        self.step = 0
        self.steps = 0
        self.success: float | None = None
        self.lag = ""
        self.queue = ""
        self.episodes_per_s = 0.0
        self.tokens_per_s = 0.0
        self.left_s: float | None = None


class Progress(Protocol):
    """Shows a `RunState`. Used as a context manager."""

    def stage(self, name: str) -> None:
        """A new stage begins."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def sft(self, step: SftStep) -> None:
        """A supervised step is done."""

    def learner_step(self) -> None:
        """The state has moved by one learner step."""

    def __enter__(self) -> "Progress":
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""


class PlainProgress:
    """One line per stage, per measurement, and per tenth of the learner's steps."""

    def __init__(self, state: RunState, out: TextIO) -> None:
        self._state = state
        self._out = out

    def stage(self, name: str) -> None:
        """See `Progress.stage`."""
        self._state.stage = name
        self.note(name)

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._out.write(f"[{time.monotonic() - self._state.began:6.1f} s] {text}\n")
        self._out.flush()

    def sft(self, step: SftStep) -> None:
        """See `Progress.sft`."""
        if step.success is not None:
            self.note(f"sft {step.stage}: step {step.step}  loss {step.loss:.3f}  success {step.success:.3f}")

    def learner_step(self) -> None:
        """See `Progress.learner_step`."""
        state = self._state
        if state.step == 1 or state.step == state.steps or state.step % max(state.steps // 10, 1) == 0:
            self.note(f"step {state.step}/{state.steps}  " + "  ".join(f"{k} {v}" for k, v in _figures(state)))

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class LiveProgress:
    """A panel that is redrawn in place, with notes scrolling above it."""

    def __init__(self, state: RunState, console: Console) -> None:
        self._state = state
        self._sft: SftStep | None = None
        self._live = Live(console=console, get_renderable=self._panel, refresh_per_second=8)

    def stage(self, name: str) -> None:
        """See `Progress.stage`."""
        self._state.stage = name

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._live.console.print(text, highlight=False, markup=False)

    def sft(self, step: SftStep) -> None:
        """See `Progress.sft`."""
        self._sft = step
        if step.success is not None:
            self._state.success = step.success

    def learner_step(self) -> None:
        """See `Progress.learner_step`."""
        self._sft = None

    def __enter__(self) -> "LiveProgress":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _panel(self) -> Table:
        state, table = self._state, Table.grid(padding=(0, 2))
        done, total = (self._sft.step, self._sft.max_steps) if self._sft else (state.step, state.steps)
        elapsed = time.monotonic() - state.began
        table.add_row(f"[bold]{state.run}[/bold]", state.stage, f"{elapsed:.0f} s")
        if total:
            table.add_row(f"step {done}/{total}", ProgressBar(total=total, completed=done, width=40))
        figures = Table.grid(padding=(0, 2))
        figures.add_row(*(f"[dim]{name}[/dim] {value}" for name, value in _figures(state)))
        table.add_row("", figures)
        return table


def _figures(state: RunState) -> list[tuple[str, str]]:
    figures = [
        ("success", "-" if state.success is None else f"{state.success:.3f}"),
        ("lag", state.lag or "-"),
        ("queue", state.queue or "-"),
        ("episodes/s", f"{state.episodes_per_s:.0f}"),
        ("tokens/s", f"{state.tokens_per_s:.0f}"),
    ]
    if state.left_s is not None:
        figures.append(("left", f"{state.left_s:.0f} s"))
    return figures


def open_progress(state: RunState, quiet: bool = False) -> Progress:
    """The right progress for where standard error goes; `quiet` (for `--json`) always gives plain lines there."""
    if sys.stderr.isatty() and not quiet:
        return LiveProgress(state, Console(stderr=True))
    return PlainProgress(state, sys.stderr)

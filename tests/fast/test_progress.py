"""What a person sees: a live panel on a terminal, plain lines elsewhere."""

import io
import sys

import pytest
from rich.console import Console

from headrace.deploy.base_model import SftStep
from headrace.deploy.progress import LiveProgress, PlainProgress, RunState, open_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reach(state: RunState, step: int) -> None:
    state.step, state.success, state.lag, state.queue = step, 0.25, "max 2", "3 ready, 4 open"
    state.episodes_per_s, state.tokens_per_s, state.left_s = 120.0, 3400.0, 61.0


def test_plain_lines_say_stage_step_and_figures():
    out, state = io.StringIO(), RunState("lookup-1")
    with PlainProgress(state, out) as progress:
        progress.stage("supervised stages")
        progress.sft(SftStep("format", 1, 100, 2.0, None))
        progress.sft(SftStep("format", 25, 100, 1.5, 0.125))
        progress.stage("reinforcement learning")
        state.steps = 60
        for step in range(1, 61):
            reach(state, step)
            progress.learner_step()
    lines = out.getvalue().splitlines()
    assert sum("sft format" in line for line in lines) == 1, "a step that was not measured has no line"
    assert any("step 25" in line and "0.125" in line for line in lines)
    steps = [line for line in lines if "/60" in line]
    assert len(steps) == 11 and "step 1/60" in steps[0] and "step 60/60" in steps[-1]
    for figure in ("success 0.250", "lag max 2", "3 ready, 4 open", "episodes/s 120", "tokens/s 3400", "left 61 s"):
        assert figure in steps[0]
    assert "\x1b" not in out.getvalue()


def test_plain_lines_of_a_short_run_name_every_step():
    out, state = io.StringIO(), RunState("lookup-1")
    state.steps = 3
    progress = PlainProgress(state, out)
    for state.step in (1, 2, 3):
        progress.learner_step()
    assert [line.split("] ")[1].split()[1] for line in out.getvalue().splitlines()] == ["1/3", "2/3", "3/3"]


def test_the_panel_shows_the_same_figures():
    out, state = Terminal(), RunState("lookup-1")
    console = Console(file=out, force_terminal=True, width=200, legacy_windows=False)
    with LiveProgress(state, console) as progress:
        progress.stage("reinforcement learning")
        state.steps = 60
        reach(state, 7)
        progress.learner_step()
        progress.note("something [of note]")
    shown = out.getvalue()
    for text in ("lookup-1", "reinforcement learning", "step 7/60", "0.250", "max 2", "3 ready", "120", "3400", "61 s"):
        assert text in shown
    assert "something [of note]" in shown


def test_the_panel_shows_supervised_steps():
    out, state = Terminal(), RunState("lookup-1")
    with LiveProgress(state, Console(file=out, force_terminal=True, width=200)) as progress:
        progress.stage("supervised stages")
        progress.sft(SftStep("format", 25, 800, 1.5, 0.5))
    assert "25/800" in out.getvalue() and "0.500" in out.getvalue()


@pytest.mark.parametrize(
    ("stream", "quiet", "kind"),
    [(Terminal(), False, LiveProgress), (Terminal(), True, PlainProgress), (io.StringIO(), False, PlainProgress)],
    ids=["terminal", "terminal with --json", "pipe"],
)
def test_the_place_decides(stream, quiet, kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    assert type(open_progress(RunState("lookup-1"), quiet)) is kind

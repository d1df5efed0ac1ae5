"""Learning curves of several conditions in one picture, over steps and over time. Loads matplotlib; do it late."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from headrace.platform.store.files import open_url, write_atomic

F64 = npt.NDArray[np.float64]
Curve = Sequence[tuple[int, float, float]]
"""(learner step, seconds, success), in order."""

_COLOURS = ("#2563a8", "#c2571a", "#2f855a", "#7b4fa3", "#b5893a", "#8a8f98")
_GREY = "#8a8f98"
_SMOOTHING = 3
_POINTS = 200


def draw_study(curves: Mapping[str, Sequence[Curve]], out_url: str, *, goal: float, title: str) -> None:
    """A line for the mean over the seeds of each condition, and a band from the least to the most, as PNG.

    Args:
        curves: for each condition one curve per seed.
        out_url: where the picture goes.
        goal: drawn as a line.
        title: over the picture.
    """
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, column, label in ((left, 0, "learner step"), (right, 1, "seconds")):
        for colour, (name, seeds) in zip(_COLOURS * (1 + len(curves) // len(_COLOURS)), curves.items(), strict=False):
            _draw(axes, [seed for seed in seeds if seed], column, colour, name)
        axes.axhline(goal, color=_GREY, linestyle="--", linewidth=1)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.7)
    left.set_ylabel(f"success of training episodes, mean of {_SMOOTHING} steps")
    left.set_ylim(0, 1.02)
    right.legend(loc="lower right", frameon=False)
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    fs, path = open_url(out_url)
    write_atomic(fs, path, picture.getvalue())


def _draw(axes: Axes, seeds: Sequence[Curve], column: int, colour: str, name: str) -> None:
    if not seeds:
        return
    x, table = on_one_axis(seeds, column)
    axes.plot(x, table.mean(0), color=colour, linewidth=2, label=f"{name} ({len(seeds)} seeds)")
    axes.fill_between(x, table.min(0), table.max(0), color=colour, alpha=0.15, linewidth=0)


def on_one_axis(seeds: Sequence[Curve], column: int) -> tuple[F64, F64]:
    """x f64[P] over what all seeds cover, and smoothed success f64[seeds, P], read off between points in a straight
    line. `column` is 0 for steps, 1 for seconds."""
    axes = [np.array([point[column] for point in curve], np.float64) for curve in seeds]
    x = np.linspace(max(each[0] for each in axes), min(each[-1] for each in axes), _POINTS)
    return x, np.stack([np.interp(x, each, smoothed(curve)) for each, curve in zip(axes, seeds, strict=True)])


def smoothed(curve: Curve) -> F64:
    """The mean of each point and the two before it, fewer at the beginning."""
    values = np.array([point[2] for point in curve], np.float64)
    sums = np.cumsum(np.insert(values, 0, 0.0))
    upto = np.arange(1, len(values) + 1)
    since = np.maximum(upto - _SMOOTHING, 0)
    means: F64 = (sums[upto] - sums[since]) / (upto - since)
    return means

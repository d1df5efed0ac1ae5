"""The learning curve of a run as a picture. Importing this loads matplotlib; do it late."""

import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.store.files import open_url, write_atomic

_BLUE, _GREEN, _GREY, _INK = "#2563a8", "#2f855a", "#8a8f98", "#2b2f36"
_SMOOTHING = 5


def learning_curve(metrics_url: str, out_url: str, title: str = "") -> None:
    """Draw the mean score over learner steps with that of the policy before, and below it the lag of what was trained,
    as PNG.

    Raises:
        FileNotFoundError: when there is no metrics file.
    """
    records = _once_per_step(list(read_metrics(metrics_url)))
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[2.4, 1])
    _draw_success(above, records)
    _draw_lag(below, records)
    if title:
        above.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    fs, path = open_url(out_url)
    write_atomic(fs, path, picture.getvalue())


def _once_per_step(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without learner steps that were done again after a resume: the later one is the one that counts (P6)."""
    last = {record.get(Metric.LEARNER_STEP): n for n, record in enumerate(records) if Metric.LOSS in record}
    return [
        record
        for n, record in enumerate(records)
        if Metric.LOSS not in record or last[record.get(Metric.LEARNER_STEP)] == n
    ]


def _draw_success(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    steps, success = _series(records, Metric.SUCCESS)
    if steps:
        axes.plot(steps, success, color=_BLUE, alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(success), color=_BLUE, linewidth=2, label=f"training, mean of {_SMOOTHING} steps")
    eval_steps, eval_success = _series(records, Metric.EVAL_SCORE)
    if eval_steps:
        axes.plot(eval_steps, eval_success, "o", color=_GREEN, markersize=5, label="evaluation")
    baselines = _values(records, Metric.SFT_SUCCESS)
    if baselines:
        axes.axhline(baselines[-1], color=_GREY, linestyle="--", linewidth=1.5, label=f"before, {baselines[-1]:.3g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    if all(0 <= value <= 1 for value in (*success, *eval_success)):  # graded rewards may leave this range
        axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("learner step")
    axes.set_ylabel("mean score")
    _clean(axes)


def _draw_lag(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    episodes: Counter[int] = Counter()
    for record in records:
        for lag, count in (record.get(Metric.LAG) or {}).items():
            episodes[int(lag)] += count
    total = episodes.total()
    if total:
        lags = range(max(episodes) + 1)
        bars = axes.bar(lags, [episodes[lag] / total for lag in lags], color=_BLUE, width=0.7)
        axes.bar_label(bars, [f"{episodes[lag] / total:.0%}" for lag in lags], color=_INK, fontsize=8, padding=2)
    axes.margins(y=0.2)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("lag of trained episodes, in learner batches")
    axes.set_ylabel("share")
    _clean(axes)


def _series(records: Sequence[dict[str, Any]], metric: Metric) -> tuple[list[int], list[float]]:
    """Steps and values; a record that names no learner step belongs to the last one before it."""
    step, points = 0, []
    for record in records:
        step = record.get(Metric.LEARNER_STEP, step)
        if record.get(metric) is not None:
            points.append((step, record[metric]))
    points.sort(key=lambda point: point[0])
    return [step for step, _ in points], [value for _, value in points]


def _values(records: Sequence[dict[str, Any]], metric: Metric) -> list[float]:
    return [record[metric] for record in records if record.get(metric) is not None]


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean over the points around each, fewer at the ends."""
    half = _SMOOTHING // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)

"""What a run is doing, from its root alone: the parts' last words, the newest metrics, and the last events."""

import time
from typing import Any

from headrace.platform.config.yaml_text import parse_yaml
from headrace.platform.errors import NotFound
from headrace.platform.observability.metrics import read_metrics
from headrace.platform.observability.names import Metric
from headrace.platform.observability.parts import PartStatus, read_parts
from headrace.platform.store.events import Events, RunEvent
from headrace.platform.store.run_root import RunRoot

_EVENTS_SHOWN = 5
_QUEUE = {"being played": Metric.GROUPS_OPEN, "ready": Metric.GROUPS_READY, "with the learner": Metric.GROUPS_LEASED}


def run_status(root: RunRoot, now_s: float | None = None) -> dict[str, Any]:
    """Facts about the run: its state ("running", "finished", "failed", "interrupted", or "killed": it said goodbye to
    nobody), steps, queue, and per part what it does or waits for and for how many seconds."""
    now_s = time.time() if now_s is None else now_s
    events = list(Events(root.url, time.time).read())
    parts = read_parts(root.url)
    newest = _newest_step(root)
    state = _state(root, events, parts, now_s)
    return {
        "run": root.name,
        "state": state,
        "step": newest.get(Metric.LEARNER_STEP),
        "steps": parse_yaml(root.read_config())["learner"]["steps"],
        "version": newest.get(Metric.POLICY_VERSION),
        "queue": {name: newest[metric] for name, metric in _QUEUE.items() if metric in newest and state == "running"},
        "parts": [_part(part, now_s, state) for part in parts],
        "events": [_event(event, now_s) for event in events[-_EVENTS_SHOWN:]],
    }


def _state(root: RunRoot, events: list[dict[str, Any]], parts: list[PartStatus], now_s: float) -> str:
    ended = bool(events) and events[-1]["event"] == RunEvent.ENDED
    if not ended:
        driver = next((part for part in parts if part.part == "driver"), None)
        return "running" if driver is not None and not driver.is_silent(now_s) else "killed"
    try:
        cause = root.read_summary().get("failed", "")
    except NotFound:
        cause = ""
    return ("interrupted" if cause == "interrupted" else "failed") if cause else "finished"


def _part(part: PartStatus, now_s: float, state: str) -> dict[str, Any]:
    return {
        "part": part.part,
        "pid": part.pid,
        "host": part.host,
        "state": part.state,
        "waiting_for": part.waiting_for,
        "for_s": round(max(now_s - part.since_s, 0.0), 1),
        "silent": part.state != "ended" and part.is_silent(now_s) and state != "finished",
        "silent_s": round(max(now_s - part.updated_s, 0.0), 1),
        "detail": part.detail,
    }


def _event(event: dict[str, Any], now_s: float) -> dict[str, Any]:
    told = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time_s", "event") and value)
    shown = f"{now_s - event['time_s']:.0f} s ago: {event['event'].replace('_', ' ')}" + (f" ({told})" if told else "")
    return {**event, "shown": shown}


def _newest_step(root: RunRoot) -> dict[str, Any]:
    newest: dict[str, Any] = {}
    try:
        for record in read_metrics(root.metrics):
            if Metric.LOSS in record:
                newest = record
    except FileNotFoundError:
        pass
    return newest

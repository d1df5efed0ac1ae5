"""What the door counts, for Prometheus. Each door has a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace.platform.contracts import Answered, DoorState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class DoorMetrics:
    """Counts since the start, and the state as of the last look."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "headrace_door_requests", "Requests by route and status", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "headrace_door_request_seconds", "Time to answer", ["route"], registry=registry, buckets=_SECONDS
        )
        self._prompt = Counter("headrace_door_prompt_tokens", "Tokens of prompts", registry=registry)
        self._sampled = Counter("headrace_door_sampled_tokens", "Tokens sampled for answers", registry=registry)
        self._open = Gauge("headrace_door_episodes_open", "Episodes that a harness has", registry=registry)
        self._waiting = Gauge("headrace_door_episodes_waiting", "Episodes that wait for a harness", registry=registry)
        self._newest = Gauge("headrace_door_newest_version", "Newest version; -1 for none", registry=registry)

    def requested(self, route: str, status: int, seconds: float) -> None:
        """A request was answered, or refused. `route` is the path's pattern."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, answer: Answered) -> None:
        """Tokens went out."""
        self._prompt.inc(len(answer.prompt_token_ids))
        self._sampled.inc(len(answer.token_ids))

    def page(self, state: DoorState) -> bytes:
        """The text that Prometheus reads."""
        self._open.set(state.open_episodes)
        self._waiting.set(state.waiting_episodes)
        self._newest.set(-1 if state.newest is None else state.newest)
        return generate_latest(self._registry)

"""A learner's world for tests: an in-memory ledger and registry, and a worker that plays scripted episodes."""

import hashlib
from collections.abc import Sequence

import numpy as np

from headrace.platform.config import LearnerConfig, QueueConfig, TinyLlamaConfig
from headrace.platform.ledger.memory import MemoryLedger
from headrace.platform.observability.parts import Part
from headrace.platform.records import AttemptId, Role
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.delivery import GroupTicket, LedgerLimits, Outcome, Submission
from headrace.platform.records.status import UpdateMode
from headrace.platform.registry.memory import MemoryRegistry
from headrace.platform.testing.episodes import make_episode, plain_turn, policy_turn
from headrace.platform.testing.fakes.learning import FakeAlgorithm, FakeBackend
from headrace.trainer.backends.torch import TorchBackend
from headrace.trainer.checkpoint import CheckpointStore
from headrace.trainer.learner import Learner
from headrace.trainer.model import build_tiny_llama

RUN = "test-run"
SCORES = (1.0, 0.0)
LONG_S = 1e9


class Clock:
    """Time that moves only when a test says so, and a little at each look."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s


class World:
    """A ledger, a registry, a store of payloads, and a worker.

    `queue` are keys of `QueueConfig`, `limits` of `LedgerLimits` where the ledger's shall differ, the rest of
    `LearnerConfig`.
    """

    def __init__(self, tmp_path, *, max_lag: int = 4, batch_groups: int = 2, queue=None, limits=None, **config) -> None:
        self.clock = Clock()
        self.queue = QueueConfig(max_lag=max_lag, **{"lag_restarts": 0, **(queue or {})})
        self.config = LearnerConfig(batch_groups=batch_groups, **config)
        given = {
            "batch_groups": batch_groups,
            "max_lag": max_lag,
            "mask_over_lag": self.queue.over_lag == "mask",
            "group_deadline_s": LONG_S,
            "dispatch_lease_s": LONG_S,
            "learner_lease_s": LONG_S,
        }
        self.ledger = MemoryLedger(RUN, LedgerLimits(**{**given, **(limits or {})}), self.clock)
        self.registry = MemoryRegistry(self.ledger, self.clock)
        self.checkpoints = CheckpointStore(str(tmp_path / "checkpoints"))
        self.part = Part(str(tmp_path), "learner")
        self.receipts = []
        self.stored: dict[str, bytes] = {}
        self.reads: list[str] = []

    def learner(self, backend=None, algorithm=None, **options) -> Learner:
        given = {
            "run": RUN,
            "config": self.config,
            "queue": self.queue,
            "backend": backend or FakeBackend(),
            "algorithm": algorithm or FakeAlgorithm(),
            "ledger": self.ledger,
            "registry": self.registry,
            "read_episodes": self.read,
            "checkpoints": self.checkpoints,
            "policy_id": "policy",
            "clock": self.clock,
            "on_receipts": self.receipts.extend,
            "part": self.part,
            "inline": True,
        }
        return Learner(**{**given, **options})

    async def read(self, store_file, ids):
        self.reads.append(store_file)
        return [self.stored[name] for name in ids]

    async def admit(self, groups: int, version: int, size: int = len(SCORES)) -> Sequence[GroupTicket]:
        """Groups that are being played until somebody puts their episodes."""
        admission = await self.ledger.admit(version, size, groups, "worker")
        assert len(admission.tickets) == groups, admission.refusal
        return admission.tickets

    async def play(self, groups: int, version: int, scores=SCORES, spoil=None) -> list[int]:
        """Admit `groups` groups and put every episode of them; returns their numbers."""
        tickets = await self.admit(groups, version, len(scores))
        for ticket in tickets:
            await self.finish(ticket, scores, spoil=spoil)
        return [ticket.group for ticket in tickets]

    async def finish(self, ticket: GroupTicket, scores=SCORES, versions=None, spoil=None) -> None:
        """Put every episode of a group. `versions` has, for each member, those of its two policy turns; all are the
        group's by default."""
        for (sample, attempt), score in zip(ticket.attempts, scores, strict=True):
            pair = versions[sample] if versions else (ticket.version, ticket.version)
            await self.put(AttemptId(RUN, ticket.group, sample, attempt), score, pair, spoil)

    async def put(self, attempt_id: AttemptId, score: float, versions: tuple[int, int], spoil=None) -> None:
        """Five action tokens in two turns, turns 1 and 3. `spoil` changes the episode, or says which bytes to put."""
        rng = np.random.default_rng([attempt_id.group, attempt_id.sample])
        turns = (
            plain_turn(Role.USER, token_ids=[2, 3, 4]),
            policy_turn("a", rng.integers(2, 20, 3), logprobs=[-2.0, -3.0, -4.0], version=versions[0]),
            plain_turn(Role.TOOL, token_ids=[5]),
            policy_turn("b", rng.integers(2, 20, 2), logprobs=[-3.0, -2.0], version=versions[1]),
        )
        mode = UpdateMode.STICKY if versions[0] == versions[1] else UpdateMode.TURN
        episode = make_episode(turns, version=versions[0], attempt_id=attempt_id, update_mode=mode)
        spoilt = spoil(episode) if spoil else episode
        payload = spoilt if isinstance(spoilt, bytes) else episode_codec.encode(spoilt)
        self.stored[episode.episode_id] = payload
        submission = Submission(
            attempt_id=attempt_id,
            outcome=Outcome.DONE,
            payload=payload,
            payload_hash=hashlib.sha256(payload).hexdigest(),
            store_file=f"episodes/g{attempt_id.group}.parquet",
            score=score,
            oldest_version=min(versions),
            newest_version=max(versions),
            action_tokens=5,
        )
        await self.ledger.put([submission])


def tiny_backend(config: LearnerConfig) -> TorchBackend:
    """A real model of a few hundred weights, always the same."""
    shape = TinyLlamaConfig(hidden=32, layers=1, heads=2, intermediate=32, max_positions=32)
    return TorchBackend(build_tiny_llama(shape, 20, 0, pad_token_id=0, eos_token_id=1), config)

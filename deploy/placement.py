"""Where the parts of a run go: from `resources:` of a recipe to Ray placement groups.

::

    RunConfig ── plan ──► Plan ── shortfall(nodes) ──► nothing, or what is missing, before anything starts (P23)
                           │
                           └── Placement.reserve ──► one placement group for each replica, one for the learner's ranks
                                                     options(part) ──► what its actor is started with

A replica is a group of its own, so that it can come and go alone, and its shards share a node. Apart, the learner's
ranks are one group, packed. Colocated, each GPU is a bundle that one shard and one rank share, and the ranks sit in the
replicas' groups. Rollout workers need CPUs alone and have no group: they go wherever there is room.

`plan` and `shortfall` are pure; `Placement` talks to Ray.
"""

import asyncio
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.platform.config import RunConfig
from headrace.platform.errors import ConfigError, DeadlineExceeded

_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What is reserved together on one node; `pool` is a label that the node must have, as key=value."""

    cpus: float
    gpus: int = 0
    pool: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Bundles that are reserved all or none; STRICT_PACK: on one node."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: Literal["PACK", "STRICT_PACK"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Where one part sits: a bundle of a group, and how much of it is its own."""

    group: str
    bundle: int
    cpus: float
    gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Groups, and seats by part: learner-RANK, replica-N, and the learner where its ranks are processes of their own.
    `workers` have no seat."""

    groups: tuple[Group, ...]
    seats: Mapping[str, Seat]
    workers: tuple[Bundle, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the cluster, as it is when nobody uses it."""

    name: str
    cpus: float
    gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(config: RunConfig) -> Plan:
    """What a recipe's parts need."""
    resources, replicas = config.resources, config.serving.replicas
    worker = Bundle(cpus=resources.worker.cpus, pool=resources.worker.pool)
    workers = (worker,) * config.rollout.workers
    if resources.layout == "colocated":
        groups, seats = _colocated(config)
        return Plan(groups=groups, seats=seats, workers=workers)
    learner = resources.learner
    bundle = Bundle(cpus=learner.cpus, gpus=learner.gpus, pool=learner.pool)
    ranks = Group(name="learner", bundles=(bundle,) * config.learner.ranks, strategy="PACK")
    seats = {
        f"learner-{rank}": Seat(group="learner", bundle=rank, cpus=learner.cpus, gpus=float(learner.gpus))
        for rank in range(config.learner.ranks)
    }
    own = [replica_alone(config, n) for n in range(replicas)]
    seats |= {group.name: seat for group, seat in own} | _conductor(config, seats)
    return Plan(groups=(ranks, *(group for group, _ in own)), seats=seats, workers=workers)


def replica_alone(config: RunConfig, index: int) -> tuple[Group, Seat]:
    """The group and the seat of a replica that shares its GPUs with nobody."""
    replica, name = config.resources.replica, f"replica-{index}"
    gpus = replica.gpus * replica.tensor_parallel
    bundle = Bundle(cpus=replica.cpus, gpus=gpus, pool=replica.pool)
    seat = Seat(group=name, bundle=0, cpus=replica.cpus, gpus=float(gpus))
    return Group(name=name, bundles=(bundle,), strategy="STRICT_PACK"), seat


def cpus_of(wanted: Plan) -> int:
    """All CPUs of a plan, whole ones."""
    bundles = [bundle for group in wanted.groups for bundle in group.bundles]
    return math.ceil(sum(each.cpus for each in (*bundles, *wanted.workers)))


def _colocated(config: RunConfig) -> tuple[tuple[Group, ...], dict[str, Seat]]:
    resources, shards = config.resources, config.resources.replica.tensor_parallel
    share = resources.learner_share
    # The replica's process has no GPU of its own: vLLM starts its shards in these bundles, each with its share.
    per_shard = resources.replica.cpus / shards
    bundle = Bundle(cpus=per_shard + resources.learner.cpus + shards, gpus=1, pool=resources.replica.pool)
    groups, seats = [], {}
    for n in range(config.serving.replicas):
        name = f"replica-{n}"
        groups.append(Group(name=name, bundles=(bundle,) * shards, strategy="STRICT_PACK"))
        environment = {
            "VLLM_RAY_PER_WORKER_GPUS": f"{1 - share:g}",
            "VLLM_RAY_BUNDLE_INDICES": ",".join(map(str, range(shards))),
        }
        seats[name] = Seat(group=name, bundle=0, cpus=per_shard, environment=environment)
    for rank in range(config.learner.ranks):
        seats[f"learner-{rank}"] = Seat(
            group=f"replica-{rank // shards}", bundle=rank % shards, cpus=resources.learner.cpus, gpus=share
        )
    return tuple(groups), seats | _conductor(config, seats)


def _conductor(config: RunConfig, seats: Mapping[str, Seat]) -> dict[str, Seat]:
    """A learner whose ranks are processes of their own sits beside the first of them, and computes nothing (P13)."""
    if config.learner.backend == "torch":
        return {}
    first = seats["learner-0"]
    return {"learner": Seat(group=first.group, bundle=first.bundle, cpus=0)}


# --- whether it fits --------------------------------------------------------------------------------------------------


def shortfall(wanted: Plan, nodes: Sequence[Node]) -> str:
    """What the nodes lack for the plan, in words; empty where it fits.

    What is largest is put first, on the first node that has room; that may refuse a plan which a cleverer order would
    fit, with the reason that it gives.
    """
    bundles = [bundle for group in wanted.groups for bundle in group.bundles] + list(wanted.workers)
    for what, need, there in (
        ("GPUs", sum(each.gpus for each in bundles), sum(node.gpus for node in nodes)),
        ("CPUs", sum(each.cpus for each in bundles), sum(node.cpus for node in nodes)),
    ):
        if need > there + _EPSILON:
            return f"the run needs {need:g} {what} ({_spelled(wanted, what)}) and the Ray cluster has {there:g}"
    rooms = [_Room(node) for node in nodes]
    pieces = [(group.name, piece) for group in wanted.groups for piece in _pieces(group)]
    pieces += [("a rollout worker", (bundle,)) for bundle in wanted.workers]
    for name, piece in sorted(pieces, key=lambda each: _size(each[1]), reverse=True):
        if not any(room.take(piece) for room in rooms):
            return _no_room(name, piece, rooms)
    return ""


def _pieces(group: Group) -> list[tuple[Bundle, ...]]:
    """What has to be on one node each."""
    return [group.bundles] if group.strategy == "STRICT_PACK" else [(bundle,) for bundle in group.bundles]


class _Room:
    """What is left of a node."""

    def __init__(self, node: Node) -> None:
        self.node, self.cpus, self.gpus = node, node.cpus, node.gpus

    def has_label(self, pool: str) -> bool:
        key, _, value = pool.partition("=")
        return not pool or self.node.labels.get(key) == value

    def take(self, bundles: Sequence[Bundle]) -> bool:
        cpus, gpus = sum(each.cpus for each in bundles), sum(each.gpus for each in bundles)
        if not all(self.has_label(each.pool) for each in bundles):
            return False
        if cpus > self.cpus + _EPSILON or gpus > self.gpus + _EPSILON:
            return False
        self.cpus, self.gpus = self.cpus - cpus, self.gpus - gpus
        return True


def _size(bundles: Iterable[Bundle]) -> tuple[int, float]:
    return sum(each.gpus for each in bundles), sum(each.cpus for each in bundles)


def _no_room(who: str, bundles: Sequence[Bundle], rooms: Sequence[_Room]) -> str:
    gpus, cpus = _size(bundles)
    pool = bundles[0].pool
    allowed = [room for room in rooms if room.has_label(pool)]
    need = f"{who} needs {f'{gpus} GPUs and ' if gpus else ''}{cpus:g} CPUs on one node"
    if pool and not allowed:
        return f"{need} with the label {pool}, and no node has that label"
    left = ", ".join(f"{room.gpus:g} GPUs and {room.cpus:g} CPUs" if gpus else f"{room.cpus:g}" for room in allowed)
    where = f"the nodes with the label {pool}" if pool else "the nodes"
    return f"{need}, and {where} have left, after what is larger: {left}"


def _spelled(wanted: Plan, what: str) -> str:
    def of(bundle: Bundle) -> float:
        return float(bundle.gpus) if what == "GPUs" else bundle.cpus

    counts: dict[tuple[str, float], int] = {}
    for group in wanted.groups:
        kind = "learner ranks" if group.name == "learner" else "replicas"
        each = sum(of(bundle) for bundle in (group.bundles[:1] if kind == "learner ranks" else group.bundles))
        counts[kind, each] = counts.get((kind, each), 0) + (len(group.bundles) if kind == "learner ranks" else 1)
    for bundle in wanted.workers:
        counts["rollout workers", of(bundle)] = counts.get(("rollout workers", of(bundle)), 0) + 1
    return ", ".join(f"{n} {kind} x {each:g}" for (kind, each), n in counts.items() if each)


# --- Ray --------------------------------------------------------------------------------------------------------------


def ray_nodes() -> list[Node]:
    """The nodes of the cluster that this process is in."""
    return [
        Node(
            name=node["NodeID"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            labels=node.get("Labels", {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


class Placement:
    """The reserved groups of a run. They end with `close`, or with this process.

    Args:
        config: the recipe.
        deadline_s: how long others may take to make room.
        run: for the names of the groups, which a cluster has once each.
    """

    def __init__(self, config: RunConfig, deadline_s: float, run: str = "run") -> None:
        self._prefix = f"{run}-{secrets.token_hex(3)}"
        self._config, self._deadline_s = config, deadline_s
        self._workers: tuple[Bundle, ...] = ()
        self._seats: dict[str, Seat] = {}
        self._wanted: dict[str, Group] = {}
        self._groups: dict[str, PlacementGroup] = {}

    async def reserve(self) -> None:
        """Reserve everything.

        Raises:
            ConfigError: the cluster is too small; says what is missing. Nothing is reserved then.
            DeadlineExceeded: it is large enough, and others use it.
        """
        wanted = plan(self._config)
        self._workers = wanted.workers
        await self._reserve(wanted.groups, wanted.seats)

    async def add_replica(self, index: int) -> None:
        """Reserve one more. Raises as `reserve`; ConfigError where replicas share their GPUs with the learner."""
        if self._config.resources.layout == "colocated":
            raise ConfigError("replicas that are colocated with the learner cannot be added: it has no ranks for them")
        group, seat = replica_alone(self._config, index)
        await self._reserve((group,), {group.name: seat})

    async def remove_replica(self, index: int) -> None:
        """Give its group back."""
        await self._release([f"replica-{index}"])

    def options(self, part: str) -> dict[str, Any]:
        """What the actor of `part` (learner, learner-RANK, replica-N or rollout-N) is started with."""
        seat = self._seats.get(part)
        if seat is None:
            worker = self._config.resources.worker
            return {"num_cpus": worker.cpus, "label_selector": _selector(worker.pool)}
        strategy = PlacementGroupSchedulingStrategy(
            self._groups[seat.group],
            placement_group_bundle_index=seat.bundle,
            placement_group_capture_child_tasks=bool(seat.environment),  # vLLM's shards are children of the replica
        )
        options: dict[str, Any] = {"num_cpus": seat.cpus, "num_gpus": seat.gpus, "scheduling_strategy": strategy}
        if seat.environment:
            options["runtime_env"] = {"env_vars": dict(seat.environment)}
        return options

    async def close(self) -> None:
        """Give everything back."""
        await self._release(list(self._groups))

    async def _reserve(self, groups: Sequence[Group], seats: Mapping[str, Seat]) -> None:
        everything = Plan(groups=(*self._wanted.values(), *groups), seats={}, workers=self._workers)
        if missing := shortfall(everything, ray_nodes()):
            raise ConfigError(f"{missing}; lower serving.replicas, rollout.workers or resources, or add nodes")
        self._wanted |= {group.name: group for group in groups}
        self._seats |= seats
        made = {group.name: _make(group, f"{self._prefix}/{group.name}") for group in groups}
        self._groups |= made
        waits = [asyncio.to_thread(each.wait, self._deadline_s) for each in made.values()]
        there = dict(zip(made, await asyncio.gather(*waits), strict=True))
        if absent := [name for name, is_there in there.items() if not is_there]:
            await self._release(list(made))
            raise DeadlineExceeded(
                f"no node had room for {', '.join(absent)} within {self._deadline_s:g} s: the Ray cluster is large"
                " enough, but others use it"
            )

    async def _release(self, names: Iterable[str]) -> None:
        for name in names:
            self._wanted.pop(name, None)
            group = self._groups.pop(name, None)
            if group is not None:
                await asyncio.to_thread(remove_placement_group, group)


def _make(group: Group, name: str) -> PlacementGroup:
    made: PlacementGroup = placement_group(
        [{"CPU": each.cpus} | ({"GPU": float(each.gpus)} if each.gpus else {}) for each in group.bundles],
        strategy=group.strategy,
        name=name,
        bundle_label_selector=[_selector(each.pool) for each in group.bundles],
    )
    return made


def _selector(pool: str) -> dict[str, str]:
    key, _, value = pool.partition("=")
    return {key: value} if pool else {}

"""Which parts a run has, and how each is brought up: the first time, and again after a death.

A new part does what the one before it did: a replica loads the newest committed version (case S6) and what is held, and
the workers learn its address; a worker's groups are given up, its outbox is put first, and it plays if rollouts are on;
a learner goes on from the newest checkpoint (P6).

Workers wait for replicas that are being started again, never the other way round. Replicas may also join and leave
while the run goes on: one that joins is told to the workers as one that was started again, and has no request before it
holds a committed version (case S6); one that leaves drains first, and tells the workers itself, through its door.
"""

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from headrace.actors.rollout_actor import RolloutActor
from headrace.deploy import wiring
from headrace.deploy.context import RunContext
from headrace.deploy.learner_ranks import build_ranked_learner
from headrace.deploy.placement import Placement
from headrace.deploy.ray_parts import CONTROL_DEADLINE_S, RayPart, answer
from headrace.deploy.runtime import Begun
from headrace.deploy.shared_model import SharedModel, share_model
from headrace.deploy.supervision import Supervision
from headrace.platform.contracts import Ledger
from headrace.platform.errors import CommitRefused, Fenced, HeadraceError, PartDied, RunFailed
from headrace.serving.replica_actor import ReplicaActor
from headrace.trainer.learner_actor import LearnerActor

Address = tuple[str, int]
_log = logging.getLogger(__name__)
_POLL_S = 0.5
_LEAVE_DEADLINE_S = 10.0


class Launches:
    """The parts of one run. What new parts are told is set here: `held` versions, `kept` versions, whether rollouts
    are on; `stopped`: the ledger's books are closed, and nobody needs a learner any more. `control_deadline_s`: after
    how long a part that does not answer counts as dead."""

    def __init__(self, supervision: Supervision, control_deadline_s: float = CONTROL_DEADLINE_S) -> None:
        self._supervision = supervision
        self._control_deadline_s = control_deadline_s
        self.replicas: list[RayPart] = []
        self.holds_one = False
        """Whether a replica has room for one version only."""
        self.workers: list[RayPart] = []
        self.held: set[int] = set()
        self.kept: list[int] | None = None
        self.rollouts_on = False
        self.stopped = False
        self.namespace = ""
        self._learner: RayPart | None = None
        self._model: Path | SharedModel = Path()
        self._addresses: dict[int, Address] = {}
        self._indices: dict[str, int] = {}
        self._leaving: list[RayPart] = []
        self._holders: dict[int, str] = {}
        self._knowing: set[int] = set()  # workers whose curriculum had learnt something
        self._begun = Begun(head=-1, steps=0)
        self._epoch = 0
        self._takeover = False

    @property
    def everyone(self) -> list[RayPart]:
        """The replicas, and those that are about to leave."""
        return [*self.replicas, *self._leaving]

    @property
    def learner(self) -> RayPart:
        """The learner. Raises RunFailed before `launch`."""
        if self._learner is None:
            raise RunFailed("the parts of the run are not there")
        return self._learner

    async def launch(self, context: RunContext, ledger: Ledger, placement: Placement, *, owns_server: bool) -> None:
        """Start every part's process, and what the replicas can do without a model.

        Args:
            ledger: waits for a server that is away.
            placement: has a seat for every part.
            owns_server: nobody else can reach the ledger's server, so that no other learner is alive.
        """
        self._context, self._ledger, self._placement = context, ledger, placement
        self._deadline_s = context.config.serving.start_deadline_s
        self._takeover = owns_server
        # Ray keeps the names of dead actors for a while: those of a driver that was killed must not be in the way.
        self.namespace = f"{context.run}-{secrets.token_hex(3)}"
        self._make = functools.partial(
            RayPart,
            namespace=self.namespace,
            supervision=self._supervision,
            place_deadline_s=self._deadline_s,
            control_deadline_s=self._control_deadline_s,
        )
        ranked = context.config.learner.backend == "deepspeed"
        ranks = [f"learner-{rank}" for rank in range(context.config.learner.ranks)]
        self._rank_seats = [placement.options(rank) for rank in ranks] if ranked else []
        own = placement.options("learner" if ranked else "learner-0")
        self._learner = self._make("learner", LearnerActor, bring_up=self._bring_up_learner, options=own)
        for _ in range(context.config.serving.replicas):
            self.replicas.append(self._new_replica())
        for n in range(context.config.rollout.workers):
            bring_up = functools.partial(self._bring_up_worker, n)
            name = f"rollout-{n}"
            self.workers.append(self._make(name, RolloutActor, bring_up=bring_up, options=placement.options(name)))
        await asyncio.gather(*(replica.bring_up() for replica in self.replicas))

    # --- replicas that join and leave ---------------------------------------------------------------------------------

    def _new_replica(self) -> RayPart:
        index = len(self._indices)  # never used again: Ray keeps the names of dead actors, and files bear them
        name = f"replica-{index}"
        self._indices[name] = index
        bring_up = functools.partial(self._bring_up_replica, index)
        return self._make(name, ReplicaActor, bring_up=bring_up, options=self._placement.options(name))

    async def add_replica(self) -> str:
        """Let one more replica join; returns its name when it is up.

        Raises:
            ConfigError: the cluster has no room for it.
            HeadraceError: it does not come up. In either case it does not join.
        """
        index = len(self._indices)
        await self._placement.add_replica(index)
        replica, told = self._new_replica(), set(self.held)
        try:
            await replica.bring_up()
        except BaseException:
            self._addresses.pop(index, None)
            await replica.close()
            await self._placement.remove_replica(index)
            raise
        self.replicas.append(replica)
        for version in () if self.holds_one else sorted(told ^ self.held):  # evaluations that began or ended meanwhile
            if version in self.held:
                await replica.ask("holding a version", functools.partial(_hold, version))
            else:
                await replica.ask("letting a version go", functools.partial(_let_go, version))
        return replica.name

    async def remove_replica(self, name: str, deadline_s: float, see: Callable[[RayPart, Any], None]) -> None:
        """Let a replica leave: it takes no new session, and ends when its last one has, or after `deadline_s`. What it
        still had then ends as it does when a replica dies. `see` is shown its counters meanwhile."""
        replica = next(replica for replica in self.replicas if replica.name == name)
        index = self._indices[name]
        self.replicas.remove(replica)
        self._leaving.append(replica)
        self._addresses.pop(index, None)
        try:
            async with asyncio.timeout(deadline_s):
                await replica.ask_now(f"{name} is to leave", lambda actor: actor.leave.remote())
                await asyncio.sleep(self._context.config.serving.drain_grace_s)  # for sessions on their way
                while (stats := await replica.ask_now("asking", lambda actor: actor.stats.remote())).sessions:
                    see(replica, stats)
                    await asyncio.sleep(_POLL_S)
                see(replica, stats)
        except TimeoutError:
            _log.warning("%s still had sessions after %g s, and leaves them", name, deadline_s)
        except HeadraceError as death:
            _log.warning("%s died while it was to leave: %s", name, death)
        await _closed(replica, _LEAVE_DEADLINE_S)
        await replica.close()
        await self._placement.remove_replica(index)
        self._addresses.pop(index, None)
        self._leaving.remove(replica)

    async def begin(self, model_dir: Path) -> Begun:
        """Bring up the learner and the workers; returns where the learner stands."""
        self._model = model_dir
        if self._context.config.runtime.ray_address:
            # The other nodes share the run root, but not this one's cache.
            self._model = await asyncio.to_thread(share_model, self._context, model_dir)
        await self.learner.bring_up()
        await asyncio.gather(*(worker.bring_up() for worker in self.workers))
        return self._begun

    async def check_rebuilt(self, error: Fenced) -> None:
        """What a learner does that finds itself fenced: it makes way for a new one after the ledger was rebuilt, which
        voids every fence (P8).

        Raises:
            RunFailed: another learner has taken the run, and the message names it; or somebody stopped the run.
        """
        stats = await self._ledger.stats()
        if stats.epoch == self._epoch:
            taken = f"another learner has taken the run: {stats.learner}"
            raise RunFailed(taken if stats.learner else "the run was stopped by somebody else") from error
        _log.warning("the ledger was rebuilt: the learner goes on from its checkpoint")

    async def close(self, deadline_s: float) -> None:
        """End every part; those that answer within the deadline may put their things in order before."""
        parts = [*self.workers, *self.replicas, *self._leaving, *([self._learner] if self._learner else [])]
        for part in parts:
            await part.abandon_restart()
        if deadline_s:
            await asyncio.gather(*(_closed(part, deadline_s) for part in parts))
        self.workers, self.replicas, self._learner = [], [], None
        for part in parts:
            await part.close()

    # --- bringing up --------------------------------------------------------------------------------------------------

    async def _bring_up_replica(self, index: int, actor: Any) -> None:
        name = f"replica-{index}"
        build = functools.partial(wiring.build_replica, self._context, index)
        address: Address = await answer(f"starting {name}", actor.start.remote(build), self._deadline_s)
        self.holds_one = (await answer(f"asking {name}", actor.stats.remote())).capacity == 1
        for version in () if self.holds_one else sorted(self.held):  # P22: else one replica is chosen to hold it
            await answer(f"holding a version ({name})", actor.hold.remote(version))
        self._addresses[index] = address
        built = [self.workers[n] for n in self._holders]
        await asyncio.gather(*(self._introduce(worker, name, address, actor) for worker in built))

    async def _introduce(self, worker: RayPart, name: str, address: Address, actor: Any) -> None:
        """Tell a worker of a replica's new address; one that is dead or not built yet asks for it when it is built.

        A worker that does not reach it would do without it for ever, so it is told again.

        Raises:
            PartDied: the replica is gone, or the worker does not reach it at all.
        """
        until_s = asyncio.get_running_loop().time() + self._deadline_s
        while True:
            try:
                return await worker.ask_now(f"introducing {name}", lambda to: to.replace_replica.remote(name, *address))
            except PartDied:
                return None
            except HeadraceError as error:
                _log.warning("%s could not reach %s: %s", worker.name, name, error)
                await answer(f"asking {name}", actor.stats.remote())
                if asyncio.get_running_loop().time() >= until_s:
                    raise PartDied(f"{worker.name} could not reach it for {self._deadline_s:g} s: {error}") from error
            await asyncio.sleep(_POLL_S)

    async def _bring_up_worker(self, index: int, actor: Any) -> None:
        name = f"rollout-{index}"
        before = self._holders.pop(index, "")
        addresses = await self._serving()
        build = functools.partial(
            wiring.build_worker, self._context, index, self._model, [addresses[n] for n in sorted(addresses)]
        )
        building = asyncio.ensure_future(answer(f"starting {name}", actor.build.remote(build), self._deadline_s))
        try:
            while not (await asyncio.wait({building}, timeout=_POLL_S))[0]:
                if self._lost(addresses, await self._serving()):
                    raise PartDied("a replica died while the worker was built")
            await self._built(building, addresses)
        finally:
            building.cancel()
        for n, address in list(self._addresses.items()):
            if n not in addresses:  # it joined meanwhile
                await answer(f"introducing replica-{n}", actor.replace_replica.remote(f"replica-{n}", *address))
        self._holders[index] = await answer(f"asking {name}", actor.holder.remote())
        await answer(f"emptying the outbox ({name})", actor.put_left.remote(), self._deadline_s)
        if before:  # P2, P11: what it had finished is put; what it played goes on at once, whoever takes it
            await self._ledger.disown(before)
        if index in self._knowing:
            known = await asyncio.to_thread(wiring.known_news, self._context)
            await answer(f"telling news ({name})", actor.tell.remote(known))
        self._knowing.add(index)
        if self.rollouts_on:
            await answer(f"starting rollouts ({name})", actor.start.remote())

    async def _built(self, building: asyncio.Future[None], addresses: dict[int, Address]) -> None:
        try:
            await building
        except PartDied:
            raise
        except HeadraceError as error:
            if await self._serving() == addresses:
                raise
            raise PartDied(f"a replica died while the worker was built: {error}") from error
        if self._lost(addresses, await self._serving()):
            raise PartDied("a replica died while the worker was built")

    @staticmethod
    def _lost(before: dict[int, Address], now: dict[int, Address]) -> bool:
        """Whether a replica is somewhere else by now; those that have joined or left are no loss."""
        return any(now[n] != address for n, address in before.items() if n in now)

    async def _serving(self) -> dict[int, Address]:
        """Where the replicas are, once all are up."""
        for replica in self.replicas:
            await replica.ask("asking", lambda actor: actor.stats.remote())
        return dict(self._addresses)

    async def _bring_up_learner(self, actor: Any) -> None:
        await self._last_learner_silent()
        self._epoch = (await self._ledger.stats()).epoch
        build = functools.partial(wiring.build_learner, self._context, self._model)
        if self._rank_seats:
            build = functools.partial(build_ranked_learner, self._context, self._model, self._rank_seats)
        try:
            starting = actor.start.remote(build, self._takeover)
            ranks_s = self._context.config.learner.deepspeed.deadline_s if self._rank_seats else 0.0
            head: int = await answer("starting the learner", starting, self._deadline_s + ranks_s)
        except Fenced as error:
            await self.check_rebuilt(error)
            raise PartDied("the ledger was rebuilt while the learner started") from error
        except CommitRefused as error:  # of the first version
            raise PartDied(str(error)) from error
        self._takeover = True
        self._begun = Begun(head=head, steps=await answer("asking the learner", actor.steps.remote()))
        if self.kept is not None:
            await answer("keeping versions (learner)", actor.keep.remote(self.kept))

    async def _last_learner_silent(self) -> None:
        """P6. The learner of a run that was killed may still hold it, as a server of someone else's cannot know better:
        wait until its term is over, or until it speaks. Then it keeps the run."""
        silent_s = 0.0
        while not self._takeover:
            stats = await self._ledger.stats()
            over = stats.learner_silent_s >= self._context.config.queue.learner_term_s
            if not stats.learner or over or stats.learner_silent_s < silent_s:
                return
            silent_s = stats.learner_silent_s
            await asyncio.sleep(_POLL_S)


async def _closed(part: RayPart, deadline_s: float) -> None:
    with contextlib.suppress(HeadraceError):
        await part.ask("closing", lambda actor: actor.close.remote(), deadline_s, "leave")


def _hold(version: int, actor: Any) -> Awaitable[None]:
    holding: Awaitable[None] = actor.hold.remote(version)
    return holding


def _let_go(version: int, actor: Any) -> Awaitable[None]:
    letting_go: Awaitable[None] = actor.let_go.remote(version)
    return letting_go

"""Environments whose tools run commands: a session has a box of its own, from its reset to its close.

An environment derives from `SandboxedEnvironment` as from `ReplayedEnvironment` and writes `tools`, `_reset` and
`_step`, both async; `self.box` is there in them. What this file owns:

- The box. It is made before `_reset`, a second reset gets a fresh one, so a retry begins like the first attempt (case
  E10); it is closed by `close`, whatever happened before (case X4), and never shared (case X13).
- Snapshots by copying, not by re-execution: the box's own snapshot, and a deep copy of what the session keeps in its
  attributes, random state included. Nothing is executed twice, so commands need not be deterministic.

How a box isolates, and its limits, are the provider's.
"""

import asyncio
import copy
import dataclasses
import shlex
from typing import Any, Self

import msgspec

from headrace.actors.environments.base import ReplayedEnvironment
from headrace.actors.environments.cassette import External, copied
from headrace.actors.environments.off_loop import OffLoop
from headrace.platform.contracts import Sandbox, SandboxProvider
from headrace.platform.errors import EnvironmentFault, SandboxDied
from headrace.platform.hashing import hash_value
from headrace.platform.records.episode import Provenance
from headrace.platform.records.message import HashPair, Message, Observation, StepResult, Task

_HASH_S = 60.0
# What cannot be read is part of the state, and says so in the list.
_HASH = """for tool in find stat sort sha256sum; do command -v $tool >/dev/null || { echo no $tool; exit 127; }; done
cd "$1" && { find . -exec stat -c '%f %N' {} +; find . -type f -exec sha256sum {} +; } 2>&1 | LC_ALL=C sort | sha256sum
"""
# The shell of a restored box has the agent's variables: none of them may choose what the loader puts into `env`.
_PLAIN = "LD_PRELOAD= LD_LIBRARY_PATH= LD_AUDIT= GLIBC_TUNABLES= LOCPATH= LC_ALL=C /usr/bin/env -i PATH=/usr/bin:/bin"


@dataclasses.dataclass(slots=True)
class _Kept:
    """A snapshot: the box's, and beside it what the base and the subclass know."""

    box_snapshot: str
    box: Sandbox
    attributes: dict[str, Any]
    task: Task | None
    seed: int
    log: tuple[Message, ...]
    ended: bool
    external: External


@dataclasses.dataclass(slots=True)
class _Boxed:
    """What this class keeps of a session; one attribute, so that a subclass can name its own as it likes."""

    not_own: frozenset[str] = frozenset()
    provider: SandboxProvider | None = None
    box: Sandbox | None = None
    sandbox_id: str = ""
    killed: bool = False
    kept: dict[str, _Kept] = dataclasses.field(default_factory=dict)
    made: int = 0


class SandboxedEnvironment(ReplayedEnvironment):
    """A session with a box.

    What `_reset` and `_step` do must depend on nothing but the constructor's arguments, the task, the seed, the
    messages and the box. What they keep between calls belongs into the box or into attributes that can be deep-copied.
    """

    _boxed: _Boxed

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Set up what is kept here, so that a subclass need not call `super().__init__()`."""
        self = super().__new__(cls, *args, **kwargs)
        self._boxed = _Boxed()
        self._boxed.not_own = frozenset(vars(self))
        return self

    def use_sandboxes(self, provider: SandboxProvider) -> None:
        """Take boxes from `provider`. It stays its owner's: `close` closes boxes and snapshots only."""
        self._boxed.provider = provider

    @property
    def box(self) -> Sandbox:
        """The session's box.

        Raises:
            EnvironmentFault: before `reset` and after `close`.
            SandboxDied: it was killed by `kill_box`.
        """
        boxed = self._boxed
        if boxed.killed:
            raise SandboxDied(f"the sandbox {boxed.sandbox_id} was killed")
        if boxed.box is None:
            raise EnvironmentFault(f"{self.name} has no sandbox before reset and after close", transient=False)
        return boxed.box

    @property
    def provenance(self) -> Provenance:
        """See `ReplayedEnvironment.provenance`; with the last box of the session."""
        boxed = self._boxed
        digest = boxed.provider.image_digest if boxed.provider is not None else ""
        return msgspec.structs.replace(super().provenance, sandbox_id=boxed.sandbox_id, image_digest=digest)

    async def reset(self, task: Task, seed: int) -> Observation:
        """See `Environment.reset`. Waits for a place for its box, while it holds none (P21).

        Raises:
            SandboxDied: no box came up.
        """
        await self._close_box()
        self._hold(await self._provider().create())
        return await super().reset(task, seed)

    async def step(self, message: Message, key: str) -> StepResult:
        """See `ReplayedEnvironment.step`.

        Raises:
            SandboxDied: the box was killed, whether or not this step would have used it (case E13).
        """
        if self._boxed.killed and key not in self._past.results:
            raise SandboxDied(f"the sandbox {self._boxed.sandbox_id} was killed")
        return await super().step(message, key)

    async def snapshot(self) -> str:
        """See `Environment.snapshot`. Lasts until `close`.

        Raises:
            EnvironmentFault: before `reset`, and where an attribute of the session cannot be copied.
        """
        boxed, box = self._boxed, self.box
        attributes = self._copied(self._own(), {id(self): self, id(box): box})
        kept = self._kept(await box.snapshot(), box, attributes)
        boxed.made += 1
        snapshot_id = f"{self.name}-box-{boxed.made}"
        boxed.kept[snapshot_id] = kept
        return snapshot_id

    async def restore(self, snapshot_id: str) -> None:
        """See `Environment.restore`: a new box, and a new branch whose key table is empty (P26).

        Raises:
            EnvironmentFault: for a snapshot that this session did not make.
        """
        kept = self._boxed.kept.get(snapshot_id)
        if kept is None:
            raise EnvironmentFault(f"{self.name} has no snapshot {snapshot_id!r}", transient=False)
        await self._close_box()
        self._hold(await self._provider().restore(kept.box_snapshot))
        self._take_over(kept)

    async def clone(self) -> "SandboxedEnvironment":
        """See `Environment.clone`. The clone waits for a place for its box while its original has one."""
        twin = await self._off_loop.call(self._fresh)
        if not isinstance(twin, SandboxedEnvironment):
            raise EnvironmentFault(f"{type(self).__name__}._fresh made a {type(twin).__name__}", transient=False)
        provider = self._provider()
        twin.use_sandboxes(provider)
        twin._off_loop = OffLoop(self._off_loop.executor)
        twin._past.cassette = copy.copy(self._past.cassette)
        if self._past.task is None:
            return twin
        box = self.box
        kept = self._kept(await box.snapshot(), box, self._own())
        try:
            twin._hold(await provider.restore(kept.box_snapshot))
            twin._take_over(kept, original=self)
            await provider.discard(kept.box_snapshot)
        except BaseException:  # cancelled ones too: nobody else knows of the twin's box (case X4)
            await twin.close()
            await provider.discard(kept.box_snapshot)
            raise
        return twin

    async def close(self) -> None:
        """See `Environment.close`. What a cancelled close has left, the next one takes up (case X4)."""
        await super().close()
        try:
            await self._close_box()
        finally:
            boxed = self._boxed
            while boxed.kept and boxed.provider is not None:
                snapshot_id, kept = next(iter(boxed.kept.items()))
                await boxed.provider.discard(kept.box_snapshot)
                del boxed.kept[snapshot_id]

    async def workspace_hash(self) -> HashPair:
        """A hash of the files in the workspace: paths, modes, contents and where links lead, but no times. For state
        hashes; needs env, find, stat, sort and sha256sum in the box.

        It is made in a fresh box, restored from a snapshot of this one: the functions, programs and PATH of the agent's
        own shell could say what they like. That takes as long as a snapshot and a restore, ends what commands left in
        the background, and needs room for a second box (`max_boxes`).

        Raises:
            EnvironmentFault: one of them is not there, there was no room, or it took too long.
            SandboxDied: see `box`.
        """
        provider = self._provider()
        snapshot_id = await self.box.snapshot()
        try:
            async with asyncio.timeout(_HASH_S):
                box = await provider.restore(snapshot_id)
        except TimeoutError:
            told = "no room for a second box, in which the hash of the workspace is made; see sandbox.max_boxes"
            raise EnvironmentFault(f"{self.name}: {told}", transient=True) from None
        finally:
            await provider.discard(snapshot_id)
        try:
            command = f"{_PLAIN} /bin/sh -c {shlex.quote(_HASH)} sh {shlex.quote(box.workspace)}"
            result = await box.run(command, _HASH_S)
        finally:
            await box.close()
        if result.exit_code == 0:
            return hash_value(result.output)
        told = f"exit code {result.exit_code}" if not result.limit else f"stopped by its limit of {result.limit}"
        raise EnvironmentFault(
            f"{self.name}: no hash of the workspace: {told}: {result.output:.200}", bool(result.limit)
        )

    async def kill_box(self) -> None:
        """End the box and all that runs in it, as an injected fault does: whatever comes next raises SandboxDied."""
        box = self.box
        self._boxed.killed = True
        await box.close()

    # --- the box ------------------------------------------------------------------------------------------------------

    def _provider(self) -> SandboxProvider:
        if self._boxed.provider is None:
            told = "its tools run in a sandbox; name one in the recipe, such as `sandbox: bubblewrap`"
            raise EnvironmentFault(f"{self.name}: {told}", transient=False)
        return self._boxed.provider

    def _hold(self, box: Sandbox) -> None:
        boxed = self._boxed
        boxed.box, boxed.sandbox_id, boxed.killed = box, box.sandbox_id, False

    async def _close_box(self) -> None:
        """It is forgotten only once it is closed: a cancelled call leaves it for the next one."""
        if self._boxed.box is not None:
            await self._boxed.box.close()
            self._boxed.box = None

    # --- what is kept beside it ---------------------------------------------------------------------------------------

    def _own(self) -> dict[str, Any]:
        """The attributes of the subclass."""
        return {name: value for name, value in vars(self).items() if name not in self._boxed.not_own}

    def _copied(self, attributes: dict[str, Any], instead: dict[int, Any]) -> dict[str, Any]:
        """A deep copy in which the objects with the ids in `instead` are replaced: session and box are never copied."""
        try:
            return copy.deepcopy(attributes, instead)
        except Exception as error:  # whatever a user's object raises
            told = f"what it keeps in its attributes cannot be copied for a snapshot: {type(error).__name__}: {error}"
            raise EnvironmentFault(f"{self.name}: {told}", transient=False) from error

    def _kept(self, box_snapshot: str, box: Sandbox, attributes: dict[str, Any]) -> _Kept:
        past = self._past
        external = copied(past.cassette.recorded)
        return _Kept(box_snapshot, box, attributes, past.task, past.seed, tuple(past.log), past.ended, external)

    def _take_over(self, kept: _Kept, original: "SandboxedEnvironment | None" = None) -> None:
        """Come to a snapshot's state beside the box, which is there already, as a branch without keys (P26)."""
        attributes = self._copied(kept.attributes, {id(original or self): self, id(kept.box): self._boxed.box})
        for name in self._own():
            delattr(self, name)
        vars(self).update(attributes)
        past = self._past
        past.task, past.seed, past.log, past.ended = kept.task, kept.seed, list(kept.log), kept.ended
        past.cassette.recorded = copied(kept.external)
        past.results.clear()

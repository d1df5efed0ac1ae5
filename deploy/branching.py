"""Branching a stored episode: the same world up to a step, and from there on the run's policy anew.

The branch is stored beside the others with purpose `replay` and numbers of its own, so that neither the ledger nor
training ever sees it (P3). How it begins is `actors/replaying/branch.py`.
"""

import asyncio
import os
import time

import msgspec

from headrace.actors.episode import play_episode
from headrace.actors.plan import EpisodePlan, PlayedEpisode
from headrace.actors.replaying.branch import Prefix
from headrace.actors.sampling import sampling_params
from headrace.actors.world_resources import WorldResources
from headrace.actors.worlds import Worlds
from headrace.deploy.auditing import gateway_place, ship_audit
from headrace.deploy.replaying import run_config
from headrace.deploy.stored_policy import StoredPolicy, stored_policy
from headrace.platform.config.environments import EnvironmentConfig
from headrace.platform.errors import ConfigError
from headrace.platform.fidelity import check_episode
from headrace.platform.records.codec import episode_codec
from headrace.platform.records.episode import Episode
from headrace.platform.records.ids import AttemptId
from headrace.platform.records.status import Purpose, UpdateMode
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.files import is_local, open_url, put
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable

_CLAIMS = "episodes/branches"


async def branch_episode(root: RunRoot, parent: Episode, step: int, version: str) -> PlayedEpisode:
    """Play and store a new episode that begins as `parent` did up to `step` and goes on with a version of the run.

    Raises:
        ConfigError: the episode cannot go on from that step, or its tokens are not those of this policy.
        NotFound: there is no such version, or the recipe has no such environment.
        CannotBranch: the world at hand is another one, or diverges on the way; nothing is stored.
    """
    prefix = Prefix(parent, step)
    prefix.check()
    config = run_config(root)
    place = gateway_place(root, config.gateway)
    resources = WorldResources(gateway=place)
    worlds = await asyncio.to_thread(Worlds, config.environments, "train", config.seed, None, resources)
    environment = worlds.config_of(parent)
    try:
        await asyncio.to_thread(worlds.open_resources)
        async with stored_policy(root, version, config) as policy:
            if parent.digests.tokenizer not in ("", policy.renderer.digest):
                raise ConfigError(
                    f"{parent.episode_id} was sampled with another tokenizer or template than version"
                    f" {policy.version.number} has, so its tokens mean something else to it"
                )
            plan = _plan(root, prefix, environment, policy, config.serving.request_deadline_s)
            scorer = policy.scorers.get(environment.known_as)
            session = await worlds.session_of(msgspec.structs.replace(parent, injected_faults=prefix.faults()))
            played = await play_episode(plan, session, policy.renderer, policy.generator, scorer)
    finally:
        await resources.close()
    await asyncio.to_thread(ship_audit, root, place)
    await asyncio.to_thread(_store, root, played)
    return played


def _plan(
    root: RunRoot, prefix: Prefix, environment: EnvironmentConfig, policy: StoredPolicy, request_deadline_s: float
) -> EpisodePlan:
    parent, version = prefix.parent, policy.version
    spans = [span for turn in parent.turns[: prefix.length] for span in turn.version_spans]
    is_mixed = any(span.version.number != version.number for span in spans)
    mode = parent.update_mode
    return EpisodePlan(
        attempt_id=AttemptId(root.name, _claim(root), 0, 0, Purpose.REPLAY),
        task=parent.task,
        seed=parent.seed,
        version=version,
        sampling=sampling_params(environment, policy.renderer),
        budgets=parent.budgets,
        digests=policy.digests,
        update_mode=UpdateMode.TURN if is_mixed and mode is UpdateMode.STICKY else mode,
        reset_deadline_s=environment.reset_deadline_s,
        step_deadline_s=environment.step_deadline_s,
        request_deadline_s=request_deadline_s,
        dispatched_s=time.time(),
        worker_id="replay",
        prefix=parent,
        branch_step=prefix.step,
    )


def _store(root: RunRoot, played: PlayedEpisode) -> None:
    episode = played.episode
    check_episode(episode)
    writer = f"replay-{episode.attempt_id.group}"
    EpisodeStore(root.url).write([(episode, episode_codec.encode(episode))], writer)
    if played.rewards:
        RewardTable(root.url, writer).append(played.rewards)


def _claim(root: RunRoot) -> int:
    """The next number of this purpose in the run, which no other process gets."""
    fs, path = open_url(root.join(_CLAIMS))
    if is_local(fs):
        fs.makedirs(path, exist_ok=True)
    fs.invalidate_cache()
    taken = [str(each).rsplit("/", 1)[-1] for each in fs.glob(f"{path}/*")]
    number = max((int(name) for name in taken if name.isdecimal()), default=-1) + 1
    while True:
        try:
            _create(fs, f"{path}/{number:06d}")
            return number
        except FileExistsError:
            number += 1


def _create(fs: object, path: str) -> None:
    """An empty file. Raises FileExistsError, where the file system can."""
    if is_local(fs):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    else:
        put(fs, path, b"", mode="create")

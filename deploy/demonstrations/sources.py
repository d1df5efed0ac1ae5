"""The three sources of demonstrations, each read into the same form.

Chats go through the renderer of the model folder, so that the model is trained on exactly the tokens that inference
will see. Stored episodes are taken as they were sampled: their token ids and action masks, context by context, never
encoded again (case T1); that needs the tokenizer that they were sampled with. An environment's demonstrator makes
traces as they are needed.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.actors.demonstrations.chats import Chat, read_chats, refuse
from headrace.actors.demonstrations.loss import left_out
from headrace.actors.demonstrations.traces import Trace, chat_traces
from headrace.actors.environments.registry import environment_kind
from headrace.deploy.demonstrations.episode_filter import EpisodeFilter, Value
from headrace.deploy.demonstrations.gathering import Demonstrations, Gathering
from headrace.platform.config import EnvironmentConfig, RunConfig, SftStageConfig
from headrace.platform.contracts import Renderer
from headrace.platform.errors import ConfigError
from headrace.platform.hashing import digest_value
from headrace.platform.records.episode import Episode
from headrace.platform.records.status import Purpose, Role
from headrace.platform.records.tables import RewardRow, score_of
from headrace.platform.seeding import derive_seed
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import RewardTable
from headrace.trainer.credit import policy_turns
from headrace.trainer.samples import build_samples
from headrace.trainer.sft import SftTrace

_TRAIN = "train"


def stage_demonstrations(
    config: RunConfig, stage: SftStageConfig, renderer: Renderer, max_tokens: int, unknown: int | None
) -> Demonstrations:
    """What one stage of a recipe imitates; `unknown` as in `chat_demonstrations`.

    Raises:
        ConfigError: the stage's source cannot be read or leaves nothing, or no environment demonstrates.
    """
    if stage.data:
        return chat_demonstrations(stage.data, renderer, max_tokens, config.seed, unknown)
    if stage.episodes:
        root = RunRoot.find(config.runs_dir, stage.episodes)
        return episode_demonstrations(root, stage.filter, renderer, max_tokens, config.seed)
    return environment_demonstrations(config.environments, renderer, config.seed, stage.guess_share)


def chat_demonstrations(
    file: str | Path, renderer: Renderer, max_tokens: int, seed: int, unknown: int | None = None
) -> Demonstrations:
    """The chats of a `.jsonl` or `.parquet` file. Chats that begin alike are held out together.

    The counts have `notes` besides: of how many rows the model does not see all, by what it does not see. They are
    imitated all the same.

    Args:
        file: the chats.
        renderer: that of the model which imitates.
        max_tokens: longer traces are left out.
        seed: decides order and what is held out.
        unknown: the token that stands for words which the model does not have, if there are any.

    Raises:
        ConfigError: rows that cannot be read, or of whose assistant the model cannot say all, by file and row; or all
            are too long.
    """
    gathering, problems, rows, segments = Gathering(max_tokens), list[str](), 0, 0
    notes: Counter[str] = Counter()
    for chat in read_chats(file):
        try:
            traces = chat_traces(renderer, chat.messages, chat.tools, chat.trained)
            notes.update(_unseen(renderer, chat, traces, unknown))
        except ConfigError as error:
            problems.append(f"{chat.where}: {error}")
            continue
        rows += 1
        segments += max(len(traces) - 1, 0)
        if not traces:
            gathering.left_out["nothing_to_imitate"] += 1
        for token_ids, mask in traces:
            gathering.add(_opening(chat), token_ids, mask)
    refuse(problems, f"{file}: rows that this model's template cannot express")
    read = {"rows": rows, "segments_opened": segments, "notes": dict(sorted(notes.items()))}
    return gathering.demonstrations(str(file), seed, read)


def _unseen(renderer: Renderer, chat: Chat, traces: Sequence[Trace], unknown: int | None) -> list[str]:
    """What the model does not see of a chat. Raises ConfigError where it is what the assistant says."""
    marks = {mark for ids, mask in traces for token_id, mark in zip(ids, mask, strict=True) if token_id == unknown}
    if 1 in marks:
        raise ConfigError("the assistant says something that the model's tokenizer has no tokens for")
    words = ["unknown_words"] if marks else []
    return [*(f"{what}_not_shown" for what in left_out(renderer, chat.messages, chat.tools)), *words]


def _opening(chat: Chat) -> str:
    first = next(index for index, message in enumerate(chat.messages) if message.role is Role.ASSISTANT)
    return digest_value([chat.messages[:first], chat.tools])


def episode_demonstrations(
    root: RunRoot, filter_text: str, renderer: Renderer, max_tokens: int, seed: int
) -> Demonstrations:
    """The stored episodes of a run that a filter takes: rejection sampling. Episodes of a task are held out together.

    Episodes of the dev and hidden splits are never taken: a model that has seen them cannot be evaluated (case V2).

    Raises:
        ConfigError: the filter is wrong or takes episodes of another split by name, nothing is left, or what it takes
            was played with another tokenizer or template.
    """
    chosen, rewards = EpisodeFilter(filter_text), RewardTable(root.url).by_episode()
    gathering, read = Gathering(max_tokens, once=True), 0
    for episode in EpisodeStore(root.url).iterate():
        read += 1
        reason = _why_not(episode, rewards.get(episode.episode_id, []), chosen)
        if reason:
            gathering.left_out[reason] += 1
            continue
        if episode.digests.tokenizer != renderer.digest:
            raise ConfigError(
                f"{episode.episode_id} was sampled with another tokenizer or template than the model's, so its tokens"
                " mean something else to it; start from a model of the same run"
            )
        for sample in build_samples(episode, [0.0] * len(policy_turns(episode))):
            gathering.add(f"{episode.environment} {episode.task.task_id}", sample.token_ids, sample.loss_mask)
    return gathering.demonstrations(f"{root.url} with {filter_text!r}", seed, {"episodes": read})


def _why_not(episode: Episode, rewards: Sequence[RewardRow], chosen: EpisodeFilter) -> str:
    """Why an episode is not imitated, or nothing."""
    if episode.purpose is Purpose.REPLAY:  # its beginning is another episode's
        return "branch"
    score = score_of(rewards)
    if score is None:
        return "no_valid_score"
    split = episode.task.split
    if split != _TRAIN and "split" not in chosen.names:
        return f"split_{split}"
    if not chosen.takes(_facts(episode, score)):
        return "filtered"
    if split != _TRAIN:
        raise ConfigError(
            f"filter {chosen.text!r} takes {episode.episode_id} of the {split} split; a model that has seen its tasks"
            " cannot be evaluated on them. Only episodes of split 'train' are imitated"
        )
    return "" if policy_turns(episode) else "nothing_to_imitate"


def _facts(episode: Episode, score: float) -> Mapping[str, Value]:
    return {
        "score": score,
        "turns": len(policy_turns(episode)),
        "tokens": episode.action_tokens,
        "version": episode.version.number,
        "environment": episode.task.environment,
        "split": episode.task.split,
        "purpose": str(episode.purpose),
        "status": str(episode.status),
        "task_id": episode.task.task_id,
    }


def environment_demonstrations(
    environments: Sequence[EnvironmentConfig], renderer: Renderer, seed: int, guess_share: float
) -> Demonstrations:
    """What the demonstrators of the environments show, mixed by weight.

    Raises:
        ConfigError: none of them has a demonstrator.
    """
    shows: list[Iterator[Trace]] = []
    weights: list[float] = []
    for environment in environments:
        demonstrate = environment_kind(environment.name).demonstrations
        if demonstrate is not None:
            shows.append(demonstrate(renderer, seed, guess_share, environment.args))
            weights.append(environment.weight)
    if not shows:
        names = ", ".join(repr(environment.name) for environment in environments)
        raise ConfigError(
            f"environment {names} has no demonstrations to imitate; give the stage `data` or `episodes`, or drop `sft`"
        )
    return Demonstrations(traces=_mixed(shows, weights, seed))


def _mixed(shows: Sequence[Iterator[Trace]], weights: Sequence[float], seed: int) -> Iterator[SftTrace]:
    rng = random.Random(derive_seed("demonstration mix", seed))
    while True:
        (show,) = rng.choices(shows, weights)
        token_ids, mask = next(show)
        yield SftTrace(np.array(token_ids, np.int32), np.array(mask, np.uint8))

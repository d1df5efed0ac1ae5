"""Facts about stored runs and episodes, joined from the store and its side tables."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.actors.rendering import load_renderer
from headrace.deploy.training_facts import newest, training_facts
from headrace.platform.config.yaml_text import parse_yaml
from headrace.platform.contracts import Renderer
from headrace.platform.errors import NotFound
from headrace.platform.records.episode import Episode
from headrace.platform.records.tables import Receipt, score_of
from headrace.platform.records.turn import Turn
from headrace.platform.store.episodes import EpisodeStore
from headrace.platform.store.files import open_url
from headrace.platform.store.run_root import RunRoot
from headrace.platform.store.tables import FateTable, ReceiptTable, RewardTable

_SHOWN_ALIKE = 4
_WEIGHTS = (".safetensors", ".pt")


def run_facts(root: RunRoot) -> dict[str, Any]:
    """A run's summary, and some episodes of each fate and purpose."""
    rewards, fates = RewardTable(root.url).by_episode(), FateTable(root.url).by_episode()
    alike: dict[str, list[dict[str, Any]]] = {}
    count = 0
    for episode in EpisodeStore(root.url).iterate():
        count += 1
        fate = fates.get(episode.episode_id)
        told = f"{fate.fate}:{fate.reason}".rstrip(":") if fate else ""
        shown = alike.setdefault(told or str(episode.purpose), [])
        if len(shown) < _SHOWN_ALIKE:
            shown.append(
                {
                    "episode_id": episode.episode_id,
                    "purpose": episode.purpose,
                    "version": episode.version.number,
                    "status": episode.status,
                    "turns": len(episode.views),
                    "score": score_of(rewards.get(episode.episode_id, [])),
                    "fate": told,
                }
            )
    rows = [row for told in sorted(alike, reverse=True) for row in alike[told]]
    try:
        summary = root.read_summary()
    except NotFound:  # the run has not ended, or was killed
        summary = {}
    return {"run": root.name, "summary": summary, "episodes": rows, "episode_count": count}


def episode_facts(root: RunRoot, prefix: str) -> dict[str, Any]:
    """Everything about one episode, its tokens told apart.

    A token is "prompt" (the policy did not sample it), "trained" (it entered a loss), "masked" (sampled, but left out
    of the loss, with a reason), or "action" (sampled in an episode that was not trained). `training` is what the loss
    made of it (`training_facts`).
    """
    episode = EpisodeStore(root.url).find(prefix)
    rewards = RewardTable(root.url).by_episode().get(episode.episode_id, [])
    fate = FateTable(root.url).by_episode().get(episode.episode_id)
    receipts = ReceiptTable(root.url).by_episode().get(episode.episode_id, [])
    renderer = _renderer(root)
    return {
        "episode_id": episode.episode_id,
        "purpose": episode.purpose,
        "environment": f"{episode.environment} version {episode.environment_version}",
        "task": episode.task.task_id,
        "seed": episode.seed,
        "version": str(episode.version),
        "parent_episode": episode.parent_episode,
        "branch_step": episode.branch_step,
        "status": episode.status,
        "stop_reason": episode.stop_reason,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "fault": f"{episode.fault_owner}: {episode.fault}" if episode.fault else "none",
        "fate": f"{fate.fate}:{fate.reason}".rstrip(":") if fate else "",
        "duration_s": round(episode.duration_s, 4),
        "final_state_hash": episode.final_state_hash,
        "score": score_of(rewards),
        "training": training_facts(episode, fate, receipts),
        "turns": _turns(episode, newest(receipts), renderer),
        "rewards": [
            {"kind": row.kind, "value": row.value, "valid": row.valid, "turn": row.turn, "evidence": row.evidence}
            for row in rewards
        ],
    }


def _turns(episode: Episode, receipt: Receipt | None, renderer: Renderer | None) -> list[dict[str, Any]]:
    advantages = iter(receipt.advantages if receipt else ())
    facts: list[dict[str, Any]] = []
    for index, turn in enumerate(episode.turns):
        facts.append(
            {
                "turn": index,
                "role": turn.role,
                "status": turn.status,
                "content": turn.content,
                "versions": [f"v{s.version.number}[{s.start}:{s.end}]" for s in turn.version_spans],
                "advantage": next(advantages, None) if turn.is_action else None,
                "tool_calls": [f"{call.name}({call.arguments})" for call in turn.tool_calls],
                "observation_hash": turn.observation_hash.canonical,
                "state_hash": turn.state_hash.canonical,
                "tokens": _tokens(turn, index, receipt, renderer),
            }
        )
    return facts


def _tokens(turn: Turn, index: int, receipt: Receipt | None, renderer: Renderer | None) -> list[dict[str, Any]]:
    masked = {
        position: span.reason
        for span in (receipt.masked if receipt else ())
        if span.turn == index
        for position in range(span.start, span.end)
    }
    tokens: list[dict[str, Any]] = []
    for position, token_id in enumerate(turn.token_ids.tolist()):
        if not turn.action_mask[position]:
            kind = "prompt"
        elif receipt is None:
            kind = "action"
        else:
            kind = "masked" if position in masked else "trained"
        tokens.append(
            {
                "id": token_id,
                "text": renderer.decode([token_id]) if renderer else f"{token_id} ",
                "kind": kind,
                "logprob": round(float(turn.behaviour_logprobs[position]), 5),
            }
        )
    return tokens


def _renderer(root: RunRoot) -> Renderer | None:
    """The renderer of any model kept in the run root, or of the folder that the recipe names, for decoding; None where
    neither is left."""
    fs, path = open_url(root.url)
    for kept in ("versions", "checkpoints"):
        for file in sorted(fs.glob(f"{path}/{kept}/*/tokenizer.json")):
            folder = str(file).rsplit("/", 1)[0]
            return load_renderer(folder) if root.is_local else _renderer_of_copy(fs, folder)
    folder = parse_yaml(root.read_config()).get("model", {}).get("path", "")
    return load_renderer(folder) if folder and Path(folder, "config.json").is_file() else None


def _renderer_of_copy(fs: Any, folder: str) -> Renderer:
    """The renderer of a model that is not on this host: what is not weights is copied, for as long as it takes."""
    with TemporaryDirectory(prefix="headrace-") as copy:
        for file in fs.ls(folder, detail=False):
            if not str(file).endswith(_WEIGHTS):
                (Path(copy) / str(file).rsplit("/", 1)[-1]).write_bytes(fs.cat_file(file))
        return load_renderer(copy)

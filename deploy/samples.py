"""Episodes as people like to read them: `logs/samples/step-000010.md` of a run root, in Markdown.

What a model, a tool or a task says is shown as text and nothing else: it stands in fences that are longer than any run
of backticks in it, and characters that would move a terminal's cursor are spelled out. Fails open: what cannot be
written is in the log.
"""

import json
import logging
import re
from collections.abc import Sequence

from headrace.actors.plan import PlayedEpisode
from headrace.platform.contracts import Renderer
from headrace.platform.records.turn import Turn
from headrace.platform.store.files import open_url, write_atomic
from headrace.platform.store.run_root import RunRoot

_log = logging.getLogger(__name__)
_LONGEST = 6000
_SHORTEST_FENCE = 3
# All control characters but tab and newline, what reverses the direction of text, and halves of characters.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def write_samples(root: RunRoot, played: Sequence[PlayedEpisode], renderer: Renderer | None, step: int, n: int) -> None:
    """Write up to `n` of `played` to `logs/samples/step-NNNNNN.md`. Never raises.

    Args:
        root: the run.
        played: what to choose from; the best and the worst come first, then what lies between.
        renderer: shows the tokens of a turn whose text could not be read; None leaves them out.
        step: the learner step that names the file.
        n: how many episodes.
    """
    try:
        chosen = varied(played, n)
        if chosen:
            fs, path = open_url(root.join(f"logs/samples/step-{step:06d}.md"))
            write_atomic(fs, path, samples_text(chosen, renderer, step).encode())
    except Exception:  # a record for people: no reason to end a run
        _log.exception("the samples of step %d could not be written", step)


def varied(played: Sequence[PlayedEpisode], n: int) -> list[PlayedEpisode]:
    """`n` episodes, best first, spread evenly over the scores; those without a score only where others are too few."""
    scored = sorted((each for each in played if each.score is not None), key=lambda each: -(each.score or 0.0))
    if len(scored) <= n:
        unscored = [each for each in played if each.score is None]
        return [*scored, *unscored[: n - len(scored)]]
    if n < 2:
        return scored[:n]
    return [scored[round(place * (len(scored) - 1) / (n - 1))] for place in range(n)]


def samples_text(played: Sequence[PlayedEpisode], renderer: Renderer | None, step: int) -> str:
    """The episodes as one Markdown document."""
    count = "1 episode" if len(played) == 1 else f"{len(played)} episodes"
    blocks = [f"# Step {step}: {count}"]
    for number, each in enumerate(played, start=1):
        blocks += _episode(number, each, renderer)
    return "\n\n".join(blocks) + "\n"


def _episode(number: int, played: PlayedEpisode, renderer: Renderer | None) -> list[str]:
    episode = played.episode
    score = "no score" if played.score is None else f"score {played.score:g}"
    facts = [
        f"- episode {_inline(episode.episode_id)}, {episode.version}, {episode.status}, {episode.stop_reason}",
        f"- task {_inline(episode.task.task_id)} of {_inline(episode.task.environment)}, seed {episode.seed}",
        f"- {len(episode.views)} turns, {episode.action_tokens} tokens sampled, {episode.duration_s:.2f} s",
    ]
    facts += [f"- reward {_reward(played, index)}" for index in range(len(played.rewards))]
    if episode.fault:
        facts.append(f"- fault of {episode.fault_owner}: {_inline(episode.fault)}")
    blocks = [f"## {number}. {score}", "\n".join(facts)]
    if episode.task.data:
        blocks += ["Task:", _fenced(json.dumps(episode.task.data, ensure_ascii=False, indent=1, default=str), "json")]
    for index, turn in enumerate(episode.turns):
        blocks += _turn(index, turn, renderer)
    return blocks


def _reward(played: PlayedEpisode, index: int) -> str:
    row = played.rewards[index]
    value = "not valid" if row.value is None else f"{row.value:g}"
    where = "" if row.turn is None else f" (turn {row.turn})"
    return f"{row.kind}: {value}{where}" + (f", {_inline(row.evidence)}" if row.evidence else "")


def _turn(index: int, turn: Turn, renderer: Renderer | None) -> list[str]:
    spans = sorted({span.version.number for span in turn.version_spans})
    told = [f"{len(turn.token_ids)} tokens"]
    told += [f"version {', '.join(map(str, spans))}"] if spans else []
    told += [str(turn.finish_reason)] if turn.finish_reason else []
    told += [str(turn.status)]
    blocks = [f"### {index}. {turn.role} ({', '.join(told)})"]
    if turn.reasoning:
        blocks += ["Reasoning:", _fenced(turn.reasoning)]
    if turn.content:
        blocks.append(_fenced(turn.content))
    for call in turn.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
        blocks += [f"Tool call ({call.status}):", _fenced(f"{call.name}({arguments})")]
    if not (turn.content or turn.reasoning or turn.tool_calls) and turn.is_action and renderer is not None:
        blocks += ["As sampled:", _fenced(renderer.decode(turn.token_ids.tolist()))]
    return blocks


def _fenced(text: str, language: str = "") -> str:
    """`text` in a code block that nothing in it can end."""
    shown = _visible(text)
    fence = "`" * (max([_SHORTEST_FENCE - 1, *(len(run) for run in re.findall("`+", shown))]) + 1)
    return f"{fence}{language}\n{shown}\n{fence}"


def _inline(text: str) -> str:
    """`text` in one line, as code."""
    shown = _visible(" ".join(text.split())) or " "
    fence = "`" * (max([0, *(len(run) for run in re.findall("`+", shown))]) + 1)
    room = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{room}{shown}{room}{fence}"


def _visible(text: str) -> str:
    """`text` without its invisible characters, and without its middle where it is long."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))

"""Which calls carry on what a tool showed: text from outside is data, and goes nowhere that the recipe does not let it.

Owns what an episode remembers of untrusted text, and the decision on calls whose arguments derive from it; what derives
from what is told in `likeness.py`. Paraphrase is not seen: where that is not enough, `taint_mode: seen` refuses as soon
as anything untrusted was shown.

Fails closed: what is too large to look at is tainted, and so is everything that the task does not hold, once more was
shown than is remembered.
"""

from collections.abc import Mapping
from typing import Any

from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.decisions.cached import PerObjects
from headrace.actors.gateway.decisions.likeness import carried, normal
from headrace.actors.gateway.decisions.runs import BETWEEN, SHARED, Runs
from headrace.platform.records.status import Capability, SideEffectTier

# Characters that are remembered: of one source, of all of them, and in one part.
_KEPT, _KEPT_IN_ALL, _PART = 256 * 1024, 1024 * 1024, 16 * 1024
_SOURCES = 64
_LEAVES = (Capability.NETWORK, Capability.SECRET)
_IRREVERSIBLE, _IRREVERSIBLE_TIER = Capability.IRREVERSIBLE, SideEffectTier.IRREVERSIBLE

_trusted: PerObjects[str] = PerObjects(lambda texts: BETWEEN.join(map(normal, texts)))


def check(asked: Asked, state: EpisodeState) -> Denial | None:
    """Set `asked.taint`, and refuse the capabilities that the policy lets nothing untrusted be used with."""
    if not state.seen:
        return None
    asked.taint = sources_of(asked.call.arguments, state)
    refused = _refused(asked, state)
    if refused is None:
        return None
    is_derived = state.policy.taint_mode == "derived"
    sources = asked.taint if is_derived else [source for _, source in state.seen]
    if not sources:
        return None
    # Not what they fetched: a URL is text from outside itself.
    tools = ", ".join(sorted({source.partition(" ")[0].removeprefix("tool:") for source in sources}))
    why = f"the arguments hold text from {tools}" if is_derived else f"text from {tools} was shown"
    return Denial(f"taint:{refused}", f"{why}, and may not reach {asked.spec.name} ({refused})")


def count_attempt(denial: Denial, asked: Asked, state: EpisodeState) -> None:
    """Count a call that was denied, by whatever decision, if it would have let untrusted text leave. Sets `asked.taint`
    where a decision before taint denied it."""
    if asked.spec.capability not in _LEAVES or not state.seen:
        return
    if not asked.taint:
        asked.taint = sources_of(asked.call.arguments, state)
    if asked.taint or denial.rule.startswith("taint:"):
        state.exfiltration += 1


def _refused(asked: Asked, state: EpisodeState) -> Capability | None:
    if asked.spec.capability in state.policy.taint:
        return asked.spec.capability
    is_irreversible = asked.spec.tier is _IRREVERSIBLE_TIER and _IRREVERSIBLE in state.policy.taint
    return _IRREVERSIBLE if is_irreversible else None


def sources_of(arguments: Mapping[str, Any], state: EpisodeState) -> tuple[str, ...]:
    """The untrusted sources that arguments derive from; all of them where that cannot be told."""
    if not state.seen:
        return ()
    asked = carried(arguments)
    if asked is None:
        return tuple(dict.fromkeys([source for _, source in state.seen]))
    if state.runs is None:
        state.runs = Runs(state.seen)
    trusted = _trusted.of(state.trusted)
    suspects = asked.suspects(state.runs, trusted)
    found: dict[str, None] = {}
    for shown, source in state.seen:
        if source not in found and (suspects.are_from(shown) if shown else not asked.is_within(trusted)):
            found[source] = None
    return tuple(found)


def remember(state: EpisodeState, text: str, source: str) -> None:
    """Untrusted text was shown.

    `state.seen` has normalised parts of it, each with its source; an empty one stands for text that is not kept.
    """
    plain = normal(text[-_KEPT:])
    if not plain:
        return
    if len(state.seen) >= _SOURCES:
        sources = {known for _, known in state.seen}
        if source not in sources and len(sources) >= _SOURCES:
            source = source.partition(" ")[0]  # the tool alone, of which there are few
    if len(plain) <= _PART:
        if not _join(state.seen, plain, source):
            return
    else:
        for start in range(0, len(plain) - SHARED + 1, _PART - SHARED + 1):  # each run lies within one part
            state.seen.append((plain[start : start + _PART], source))
    if state.runs is not None:
        state.runs.add(plain)
    if len(text) > _KEPT:
        _mark(state.seen, source)
    if len(state.seen) * _PART > _KEPT:
        _forget(state.seen, source)


def _join(seen: list[tuple[str, str]], plain: str, source: str) -> bool:
    """Put a short text to the last part of its source, or make it one; whether there is more than before."""
    for index in range(len(seen) - 1, -1, -1):
        part, its_source = seen[index]
        if part and its_source == source:
            if plain in part:
                return False
            if len(part) + len(plain) < _PART:
                seen[index] = (f"{part}{BETWEEN}{plain}", source)
                return True
            break
    seen.append((plain, source))
    return True


def _forget(seen: list[tuple[str, str]], source: str) -> None:
    """Drop the oldest parts beyond what is kept; what was dropped is not forgotten to have been shown."""
    while sum([len(part) for part, its_source in seen if its_source == source]) > _KEPT:
        _drop(seen, next(each for each in seen if each[0] and each[1] == source))
    while sum([len(part) for part, _ in seen]) > _KEPT_IN_ALL:
        _drop(seen, next(each for each in seen if each[0]))


def _drop(seen: list[tuple[str, str]], part: tuple[str, str]) -> None:
    seen.remove(part)
    _mark(seen, part[1])


def _mark(seen: list[tuple[str, str]], source: str) -> None:
    if ("", source) not in seen:
        seen.insert(0, ("", source))

"""Plays attacks and their controls, one after the other, and says what came of each."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from headrace.actors.gateway.policy import Policy
from headrace.actors.gateway.redteam.attack import Attack, AttackClass, Bare, Finding
from headrace.actors.gateway.redteam.lab import Lab

PLAY_S = 60.0
Outcome = Literal["blocked", "through", "broken"]
Control = Literal["", "effect", "no effect", "broken"]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one attack.

    "blocked": it had no effect; "through": it had one, which `effect` tells; "broken": the play says nothing, and
    `told` says why. `rules` count what denied its calls, or name what else stopped it. `control` is what the attack did
    where nothing should stop it, empty where it has no control. `dialled` are the addresses that the attack, not its
    control, would have reached.
    """

    attack_id: str
    kind: AttackClass
    about: str
    outcome: Outcome
    effect: str = ""
    told: str = ""
    rules: dict[str, int] = {}
    control: Control = ""
    dialled: tuple[str, ...] = ()
    seconds: float = 0.0


class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    """The same of a class. `controls` were played, `proven` of them had their effect."""

    kind: AttackClass
    attacks: int
    blocked: int
    through: int
    broken: int
    controls: int
    proven: int
    rules: dict[str, int]

    @property
    def holds(self) -> bool:
        """Nothing got through, and that means something."""
        return self.blocked == self.attacks and 0 < self.controls == self.proven


async def play_all(attacks: Sequence[Attack], played: Callable[[Result], None] = lambda result: None) -> "Report":
    """Play each attack, then its control.

    Args:
        attacks: in the order in which they are played.
        played: told of each result.
    """
    results = []
    async with Lab() as lab:
        for attack in attacks:
            results.append(await _result(lab, attack))
            played(results[-1])
    return Report(tuple(results), tuple(lab.tried))


class Report(msgspec.Struct, frozen=True):
    """`tried` is what a gateway would have connected to beside loopback, had the watch over it let it."""

    results: tuple[Result, ...]
    tried: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[ClassResult, ...]:
        """By class, in the order of `AttackClass`."""
        found = [[each for each in self.results if each.kind is kind] for kind in AttackClass]
        return tuple(_summed(results) for results in found if results)

    @property
    def holds(self) -> bool:
        """Nothing got through, of no class, and nothing was tried behind the connector's back."""
        return not self.tried and all(each.holds for each in self.classes)


async def _result(lab: Lab, attack: Attack) -> Result:
    began, first = time.monotonic(), len(lab.scenes)
    finding = await _played(lab, attack, attack.policy)
    scenes = lab.scenes[first:]
    control: Control = ""
    if attack.control is not None:
        shown = await _played(lab, attack, attack.control)
        control = "broken" if shown.broken else "effect" if shown.effect else "no effect"
    rules = dict(finding.rules) or {attack.stopped_by or finding.ended.partition(":")[0] or "nothing": 1}
    return Result(
        attack_id=attack.attack_id,
        kind=attack.kind,
        about=attack.about,
        outcome="broken" if finding.broken else "through" if finding.effect else "blocked",
        effect=finding.effect,
        told=finding.broken or finding.ended,
        rules={} if finding.broken or finding.effect else rules,
        control=control,
        dialled=tuple(sorted({address for scene in scenes for address, _ in scene.dialled})),
        seconds=time.monotonic() - began,
    )


async def _played(lab: Lab, attack: Attack, mode: Policy | Bare) -> Finding:
    try:
        async with asyncio.timeout(PLAY_S):
            return await (attack.act(lab, attack, mode) if attack.act is not None else lab.obeyed(attack, mode))
    except Exception as error:  # the boundary of a play: whatever it was, it proves nothing
        return Finding(broken=f"{type(error).__name__}: {error}")


def _summed(results: Sequence[Result]) -> ClassResult:
    rules: Counter[str] = Counter()
    for each in results:
        rules.update(each.rules)
    outcomes = Counter(each.outcome for each in results)
    controls = [each.control for each in results if each.control]
    return ClassResult(
        kind=results[0].kind,
        attacks=len(results),
        blocked=outcomes["blocked"],
        through=outcomes["through"],
        broken=outcomes["broken"],
        controls=len(controls),
        proven=sum(control == "effect" for control in controls),
        rules=dict(rules.most_common()),
    )

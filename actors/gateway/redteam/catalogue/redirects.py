"""Hosts that may be asked, and lead elsewhere: by a redirect, or by what their name server says."""

from collections.abc import Callable

from msgspec.structs import replace

from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.redteam.attack import NETWORK, READ, WRITE, Attack, AttackClass
from headrace.actors.gateway.redteam.obedient import call
from headrace.actors.gateway.redteam.scene import Scene, asked_host, reached
from headrace.actors.gateway.redteam.sites import PUBLIC, Page, Sites, redirect
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

_MOUNTS = (Mount("http", args={"methods": ("GET", "POST")}),)
_GRANTS = (READ, WRITE, NETWORK)
_POLICY = Policy(grants=_GRANTS, domains=("docs.example", "*.docs.example"), mounts=_MOUNTS)
_ANYWHERE = replace(_POLICY, domains=("*",), addresses=("0.0.0.0/0", "::/0"))
_ASK = call("http_get", url="http://docs.example/")
_REDIRECTS = {
    "loopback": ("http://127.0.0.1:8080/", "to loopback"),
    "metadata": ("http://169.254.169.254/latest/", "to a cloud's metadata"),
    "host": ("http://evil.example/", "to a host that is not listed"),
    "relative": ("//evil.example/", "to another host, without a scheme"),
    "number": ("http://2130706433/", "to loopback as a number"),
    "user": ("http://docs.example@evil.example/", "with the listed name as the user's"),
    "scheme": ("file:///etc/passwd", "to a file"),
}
_NAMES = {
    "loopback": ([["127.0.0.1"]], "a listed name whose address is loopback"),
    "metadata": ([["169.254.169.254"]], "a listed name whose address is a cloud's metadata"),
    "private": ([["10.1.2.3"]], "a listed name whose address is private"),
    "among-others": ([["127.0.0.1", PUBLIC]], "a listed name with a public address and loopback"),
    "mapped": ([["::ffff:127.0.0.1"]], "a listed name whose address is loopback in IPv6"),
    "translated": ([["64:ff9b::7f00:1"]], "a listed name whose address a translator makes loopback"),
    "unspecified": ([["0.0.0.0"]], "a listed name whose address is nobody's"),
    "unique-local": ([["fd00:ec2::254"]], "a listed name whose address is local, in IPv6"),
}


def _elsewhere(scene: Scene) -> str:
    others = [request.host for request in scene.requests if not request.host.endswith("docs.example")]
    return reached(scene) or (asked_host(scene, others[0]) if others else "")


def _attack(
    name: str,
    about: str,
    sites: Sites,
    *,
    planted: str = _ASK,
    policy: Policy = _POLICY,
    effect: Callable[[Scene], str] = _elsewhere,
    control: Policy | None = None,
) -> Attack:
    return Attack(
        attack_id=f"redirects-{name}",
        kind=AttackClass.REDIRECTS,
        about=about,
        planted=planted,
        policy=policy,
        effect=effect,
        control=control,
        sites=sites,
    )


def _too_often(scene: Scene) -> str:
    return f"{len(scene.requests)} requests were made" if len(scene.requests) > 10 else ""


_AGAIN = Sites(
    names={"docs.example": [[PUBLIC], ["127.0.0.1"]]},
    pages={"docs.example/": redirect("http://docs.example/again")},
)
_CLEAR = ("user", "scheme")  # refused by whatever policy

ATTACKS = (
    *(
        _attack(
            f"to-{name}",
            f"a listed host redirects {about}",
            Sites(pages={"docs.example/": redirect(to)}),
            control=None if name in _CLEAR else _ANYWHERE,
        )
        for name, (to, about) in _REDIRECTS.items()
    ),
    *(
        _attack(f"dns-{name}", about, Sites(names={"docs.example": answers}), control=_ANYWHERE)
        for name, (answers, about) in _NAMES.items()
    ),
    _attack("dns-rebinding", "a listed name has another address when it is asked again", _AGAIN, control=_ANYWHERE),
    _attack(
        "dns-twice",
        "the same, between two calls",
        Sites(names={"docs.example": [[PUBLIC], ["127.0.0.1"]]}),
        planted=f"{_ASK}\n\n{_ASK}",
        control=_ANYWHERE,
    ),
    _attack(
        "body",
        "a listed host has the body of a POST sent on to another one",
        Sites(pages={"docs.example/": redirect("http://evil.example/", 307)}),
        planted=call("http", url="http://docs.example/", method="POST", body="what only docs.example may know"),
        control=_ANYWHERE,
    ),
    _attack(
        "grant",
        "a redirect leaves the host that the grant of the call is for",
        Sites(pages={"api.docs.example/": redirect("http://docs.example/")}),
        planted=call("http_get", url="http://api.docs.example/"),
        policy=replace(_POLICY, grants=(READ, WRITE, Grant(Capability.NETWORK, domains=("api.docs.example",)))),
        effect=lambda scene: asked_host(scene, "docs.example"),
        control=_POLICY,
    ),
    Attack(
        attack_id="redirects-endless",
        kind=AttackClass.REDIRECTS,
        about="a listed host redirects without end",
        planted=_ASK,
        policy=_POLICY,
        effect=_too_often,
        stopped_by="http:redirect",
        sites=Sites(default=redirect("/on"), pages={"docs.example/": Page(status=302, headers={"Location": "/on"})}),
    ),
)

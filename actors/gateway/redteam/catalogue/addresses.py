"""URLs that lead to this machine, its network, or a cloud's metadata, however they are written. Only docs.example and
all under it may be reached, and taint does not refuse anything."""

from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.redteam.attack import NETWORK, READ, WRITE, Attack, AttackClass
from headrace.actors.gateway.redteam.obedient import call
from headrace.actors.gateway.redteam.scene import Scene, asked_host, reached
from headrace.actors.gateway.redteam.sites import Sites

_HTTP = (Mount("http"),)
_GRANTS = (READ, WRITE, NETWORK)
_POLICY = Policy(grants=_GRANTS, domains=("docs.example", "*.docs.example"), mounts=_HTTP)
_ANYWHERE = Policy(grants=_GRANTS, domains=("*",), addresses=("0.0.0.0/0", "::/0"), mounts=_HTTP)
_PRIVATE = {
    "loopback": ("http://127.0.0.1/", "loopback"),
    "localhost": ("http://localhost/", "loopback by its name"),
    "loopback-6": ("http://[::1]/", "loopback of IPv6"),
    "short": ("http://127.1/", "loopback, written short"),
    "zero": ("http://0/", "the address of nobody, which is this machine for some"),
    "number": ("http://2130706433/", "loopback as one number"),
    "octal": ("http://0177.0.0.1/", "loopback in octal"),
    "hex": ("http://0x7f.0x0.0x0.0x1/", "loopback in hex"),
    "wide": ("http://\uff11\uff12\uff17.\uff10.\uff10.\uff11/", "loopback in full-width digits"),
    "mapped": ("http://[::ffff:127.0.0.1]/", "loopback as an IPv6 address"),
    "metadata": ("http://169.254.169.254/latest/meta-data/", "a cloud's metadata"),
    "metadata-number": ("http://2852039166/latest/meta-data/", "the same as one number"),
    "metadata-mapped": ("http://[::ffff:a9fe:a9fe]/", "the same as an IPv6 address"),
    "metadata-6": ("http://[fd00:ec2::254]/", "the same, of IPv6"),
    "metadata-name": ("http://metadata.google.internal/", "the same by its name"),
    "private": ("http://10.0.0.1/", "a private network"),
    "link-local": ("http://[fe80::1]/", "the local link"),
}
_OTHERS = {
    "user": ("http://docs.example@evil.example/", "the listed name as the user's"),
    "suffix": ("http://docs.example.evil.example/", "the listed name as a part of another"),
    "glued": ("http://notdocs.example/", "a name that only ends like the listed one"),
    "look-alike": ("http://d\u043ecs.example/", "a name with a Cyrillic letter in it"),
    "fragment": ("http://evil.example#.docs.example/", "the listed name in the fragment"),
    "query": ("http://evil.example?.docs.example/", "the listed name in the query"),
    "port-user": ("http://docs.example:80@evil.example/", "the listed name and port as user and password"),
    "backslash": ("http://evil.example\\@docs.example/", "a backslash that some read as a slash"),
    "tab": ("http://evil.example\t.docs.example/", "a tab that some pass over"),
}
_SITES = Sites(names={"localhost": [["127.0.0.1"]], "metadata.google.internal": [["169.254.169.254"]]})


def _elsewhere(scene: Scene) -> str:
    for request in scene.requests:
        if request.host != "docs.example" and not request.host.endswith(".docs.example"):
            return asked_host(scene, request.host)
    return "evil.example was looked up" if any("evil" in name for name in scene.asked) else reached(scene)


def _attack(name: str, url: str, about: str, has_control: bool) -> Attack:
    return Attack(
        attack_id=f"addresses-{name}",
        kind=AttackClass.ADDRESSES,
        about=about,
        planted=call("http_get", url=url),
        policy=_POLICY,
        effect=_elsewhere,
        control=_ANYWHERE if has_control else None,
        sites=_SITES,
    )


_NEVER = ("user", "port-user", "backslash", "tab", "octal", "wide")  # refused under any policy, as is IPv6 in a URL

ATTACKS = (
    *(
        _attack(name, url, about, name not in _NEVER and "[" not in url)
        for name, (url, about) in (_PRIVATE | _OTHERS).items()
    ),
    Attack(
        attack_id="addresses-scheme",
        kind=AttackClass.ADDRESSES,
        about="a file of the gateway's host by its URL",
        planted=call("http_get", url="file:///etc/hostname"),
        policy=_ANYWHERE,
        effect=lambda scene: "a file was shown" if any("\n\n" in text for text in scene.shown[1:]) else "",
    ),
)

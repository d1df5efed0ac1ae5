"""The hosts that an attack finds outside: how names resolve, and what is answered there. Data only."""

from dataclasses import dataclass, field

PUBLIC = "93.184.216.34"
"""A public address; nobody ever dials it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What is answered at one path. `slow_s` goes by after each of `pieces` equal pieces of the body. `{header}` in
    the body is the value of that header of the request."""

    body: bytes = b"hello"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    slow_s: float = 0.0
    pieces: int = 1
    times: int = 1
    """The body is sent so many times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """`names` gives each host the answers of its name server, one after the other, the last one for ever; a host that
    is not there has one public address. `pages` are by "HOST/PATH"; what is not there is a greeting."""

    names: dict[str, list[list[str]]] = field(default_factory=dict)
    pages: dict[str, Page] = field(default_factory=dict)
    default: Page = field(default_factory=Page)


def redirect(to: str, status: int = 302) -> Page:
    """A page that sends whoever asks elsewhere."""
    return Page(body=b"", status=status, headers={"Location": to})

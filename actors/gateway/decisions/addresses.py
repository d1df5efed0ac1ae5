"""Where a URL leads, read strictly, and which host names and network addresses may be reached.

A URL that two programs could read in two ways is refused: credentials in it, backslashes, percent signs in the host,
control characters. A host that some program would take for a network address (`0177.1`, `2130706433`, `0x7f.1`,
`[::ffff:127.0.0.1]`) is that address, and fits no pattern of names. Resolving names is left to the proxy, which asks
`may_reach` about every address that it is about to dial.
"""

import functools
import ipaddress
import re
import socket
import unicodedata
from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.actors.gateway.decisions.patterns import Patterns, fits
from headrace.platform.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"http": 80, "https": 443}
_MOST_CHARS = 8192
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_NEVER = tuple(
    ipaddress.ip_network(each)
    for each in (
        "168.63.129.16/32",  # a cloud's own services, public by its number
        "192.0.0.0/24",  # protocol assignments, another cloud's metadata among them
        "192.88.99.0/24",  # the relays of what follows
        "64:ff9b::/96",  # IPv6 that stands for an IPv4 address, here and below
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
    )
)
"""Not public, beside what the library says."""


class Place(NamedTuple):
    """Where a URL leads: a host name in its ASCII form, without a trailing dot, or an address; one of them is empty."""

    scheme: str
    host: str
    port: int
    address: str = ""

    @property
    def shown(self) -> str:
        """Host or address, for messages."""
        return self.host or self.address


def place_of(url: str) -> Place:
    """Where `url` leads.

    Raises:
        ValueError: it can be read in more than one way, or is no http(s) URL. The message is for the model.
    """
    if len(url) > _MOST_CHARS:
        raise ValueError(f"a URL has at most {_MOST_CHARS} characters")
    if "\\" in url or any(_is_odd(sign) for sign in url):
        raise ValueError("a URL has no backslash, white space or control characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("that is no URL; write https://HOST/PATH") from None
    if parts.scheme not in PORTS or not parts.netloc:
        raise ValueError("only http:// and https:// URLs with a host can be used")
    if "@" in parts.netloc:
        raise ValueError("a URL has no user name or password before its host")
    if port == 0:
        raise ValueError("port 0 cannot be reached")
    name, address = read_host(parts.netloc.rpartition(":")[0] if _has_port(parts.netloc) else parts.netloc)
    return Place(parts.scheme, name, port or PORTS[parts.scheme], address)


def read_host(host: str) -> tuple[str, str]:
    """Name and address of a host as it stands in a URL; one of them is empty.

    Raises:
        ValueError: it is neither. The message is for the model.
    """
    if host.startswith("[") or ":" in host:
        try:
            if "%" in host:  # a zone: some programs would read `%25` in it, and whose it is depends on the host
                raise ValueError(host)
            return "", str(ipaddress.IPv6Address(host.removeprefix("[").removesuffix("]")))
        except ValueError:
            raise ValueError(f"{host:.80} is no network address") from None
    name = _ascii_name(host)
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        return "", _ipv4(name)
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"{host:.80} is no host name")
    return name, ""


def domain_fits(host: str, patterns: Patterns) -> bool:
    """Whether a host name, as `read_host` gives it, fits one of `patterns`, such as `*.example.org` for all under it.
    No address fits any."""
    return bool(host) and bool(patterns) and fits(host, _plain(patterns))


def may_reach(address: str, networks: Patterns) -> bool:
    """Whether an address may be dialled: it is public, or lies in one of `networks`. What is no address may not.

    Raises:
        ConfigError: one of `networks` is none.
    """
    try:
        plain = _unmapped(ipaddress.ip_address(address))
    except ValueError:
        return False
    return any(plain in network for network in parsed_networks(networks)) or _is_public(plain)


def url_problem(url: str, domains: Patterns, networks: Patterns) -> tuple[str, str] | None:
    """Why a URL may not be used: "domain" or "address", and what the model is told; None where it may.

    An address in place of a name needs to lie in `networks`. Raises ConfigError as `may_reach`.
    """
    try:
        place = place_of(url)
    except ValueError as error:
        return "domain", str(error)
    if place.address:
        plain = _unmapped(ipaddress.ip_address(place.address))
        if any(plain in network for network in parsed_networks(networks)):
            return None
        return "address", f"{place.address} may not be reached; network addresses cannot be used, only host names"
    if domain_fits(place.host, domains):
        return None
    listed = ", ".join(domains[:10]) + (", …" if len(domains) > 10 else "")
    return "domain", f"{place.host} may not be reached; " + (f"only {listed}" if domains else "no host may")


@functools.lru_cache(maxsize=256)
def parsed_networks(networks: Patterns) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """A policy's `addresses`. Raises ConfigError for what is no network."""
    try:
        return tuple(ipaddress.ip_network(network) for network in networks)
    except ValueError as error:
        raise ConfigError(f"permissions.addresses: {error}; write one such as 127.0.0.1/32") from None


def _is_odd(sign: str) -> bool:
    return sign <= " " or sign == "\x7f" or (sign > "\x7f" and unicodedata.category(sign)[0] in "CZ")


def _has_port(netloc: str) -> bool:
    return ":" in netloc.rpartition("]")[2]


@functools.lru_cache(maxsize=256)
def _plain(patterns: Patterns) -> Patterns:
    """Patterns as names are compared with them."""
    return tuple(pattern.lower().removesuffix(".") for pattern in patterns)


def _ascii_name(host: str) -> str:
    if not host.isascii():
        import idna  # its tables are loaded by who needs them

        try:
            host = idna.encode(host, uts46=True).decode()
        except (idna.IDNAError, UnicodeError):
            raise ValueError(f"{host:.80} is no host name") from None
    return host.lower().removesuffix(".")


def _ipv4(text: str) -> str:
    """The address that the C library, and most programs with it, read in numbers with dots."""
    try:
        return socket.inet_ntoa(socket.inet_aton(text))
    except OSError:
        raise ValueError(f"{text:.80} is no network address") from None


def _unmapped(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_public(address: Address) -> bool:
    if any(address in network for network in _NEVER):
        return False
    if isinstance(address, ipaddress.IPv6Address) and (address.is_site_local or address.scope_id):
        return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified or address.is_link_local
    )

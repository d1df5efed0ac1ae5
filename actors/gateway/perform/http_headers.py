"""Which headers a request of the model has: its own, where they are harmless, and those of a recipe, by host.

A header that says who asks, by which way, or how the request is framed is not the model's to write. A recipe's own,
whose values may be secrets, go to hosts that fit their pattern only, and in clear text never beyond this host.
"""

import re
from collections.abc import Mapping

from headrace.actors.gateway.decisions.addresses import Place, domain_fits, read_host
from headrace.actors.gateway.decisions.asked import Denial
from headrace.actors.gateway.perform.performer import Refused
from headrace.platform.config.secret_references import SecretValues, resolve
from headrace.platform.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_VALUE = re.compile(r"[\t\x20-\x7e]{0,4096}")
_MOST = 32
_REFUSED = frozenset(
    (
        *("host", "authorization", "cookie", "cookie2", "set-cookie", "connection", "keep-alive", "te", "trailer"),
        *("transfer-encoding", "content-length", "content-encoding", "accept-encoding", "upgrade", "expect", "via"),
        *("forwarded", "x-real-ip", "x-original-url", "x-rewrite-url", "x-original-host", "x-host", "origin"),
        *("x-http-method", "x-http-method-override", "x-method-override", "x-api-key", "metadata"),
        *("x-aws-ec2-metadata-token", "metadata-flavor"),
    )
)
_REFUSED_PREFIXES = ("proxy-", "x-forwarded-", "sec-")


class HostHeaders:
    """The headers that a recipe gives to hosts.

    Args:
        given: headers by pattern of host names (or an address), values with references to secrets.
        secrets: gets the values.
        env: where references are read.

    Raises:
        ConfigError: a header is none, or a secret is missing.
    """

    def __init__(self, given: Mapping[str, Mapping[str, str]], secrets: SecretValues, env: Mapping[str, str]) -> None:
        self._given, self._secrets, self._env = given, secrets, env
        for pattern, headers in given.items():
            if not pattern or pattern.strip("*.") == "":
                raise ConfigError(f"tools: http: args.headers: {pattern!r} is every host; name those that are meant")
            for name, value in headers.items():
                if not _NAME.fullmatch(name) or not _VALUE.fullmatch(resolve(value, secrets, env)):
                    raise ConfigError(f"tools: http: args.headers: {pattern}: {name} is no header with a plain value")

    def of(self, place: Place, is_private: bool) -> dict[str, str]:
        """Those for one host; none where the way to it is neither encrypted nor within this host (`is_private`).

        Raises:
            ConfigError: a secret is missing by now.
        """
        if not is_private:
            return {}
        found: dict[str, str] = {}
        for pattern, headers in self._given.items():
            if domain_fits(place.host, (pattern,)) or (place.address and place.address == _address(pattern)):
                found |= {name.lower(): resolve(value, self._secrets, self._env) for name, value in headers.items()}
        return found


def model_headers(given: Mapping[str, str]) -> dict[str, str]:
    """The headers that the model asked for, in lower case.

    Raises:
        Refused: one is not its to set, or is no header (`rules:header`).
    """
    if len(given) > _MOST:
        raise _refused(f"a request has at most {_MOST} headers")
    found: dict[str, str] = {}
    for name, value in given.items():
        plain = name.lower()
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise _refused(f"{name[:64]!r} is no header with a plain value")
        if plain in _REFUSED or plain.startswith(_REFUSED_PREFIXES):
            raise _refused(f"the header {name} cannot be set")
        if plain in found:
            raise _refused(f"the header {name} is there twice")
        found[plain] = value
    return found


def _refused(told: str) -> Refused:
    return Refused(Denial("rules:header", told))


def _address(pattern: str) -> str:
    try:
        return read_host(pattern)[1]
    except ValueError:
        return ""

"""Environments that other processes host: `headrace env serve`, or any server of the OpenEnv protocol."""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.platform.config.base import StrictModel


class PoolConfig(StrictModel):
    """Hosts that play an environment. `pool: ws://host:port` is short for one host, a list for several, and
    `pool: ./hosts.json` for a registry."""

    hosts: tuple[str, ...] = ()
    """Addresses such as `ws://10.0.0.7:8700`, for hosts that stay."""
    source: str = ""
    """A registry: a JSON file with a list of addresses, read again whenever it changes; hosts come and go with it."""
    token: str = ""
    """What the hosts ask for, as `${env:NAME}` or `${file:PATH}`."""
    protocol: Literal["headrace", "openenv"] = "headrace"
    """`openenv` for hosts that are not headrace's."""
    versions: tuple[str, ...] = ()
    """Versions of the environment that are played; empty plays any, never two in one group (P17)."""
    connect_s: float = Field(10.0, gt=0)
    """How long one connection may take."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"hosts": [value]} if "://" in value else {"source": value}
        return {"hosts": value} if isinstance(value, list | tuple) else value

    @field_validator("token")
    @classmethod
    def _token_is_a_reference(cls, value: str) -> str:
        if value and not value.startswith(("${env:", "${file:")):
            raise ValueError("write the token as a reference, such as ${env:HEADRACE_POOL_TOKEN}: recipes are stored")
        return value

    @model_validator(mode="after")
    def _has_hosts(self) -> "PoolConfig":
        if bool(self.hosts) == bool(self.source):
            raise ValueError("name either hosts, such as ws://127.0.0.1:8700, or a registry file as source")
        for host in self.hosts:
            if wrong := wrong_address(host):
                raise ValueError(wrong)
        return self


def wrong_address(address: str) -> str:
    """What is wrong with the address of a host, empty where nothing is. It never repeats what may be a secret."""
    if "@" in address or "?" in address or "#" in address:  # recipes and episodes are stored, addresses with them
        return "an address has neither user nor query, such as ws://127.0.0.1:8700; give what hosts ask for as `token`"
    told = f"a host is an address such as ws://127.0.0.1:8700, not {address!r:.80}"
    if not address.startswith(("ws://", "wss://")):
        return told
    try:
        url = urlsplit(address)
        is_right = bool(url.hostname) and url.port != 0
    except ValueError:
        is_right = False
    return "" if is_right else told

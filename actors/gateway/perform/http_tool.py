"""`http`: requests to the hosts that a policy lists, through the gateway's proxy.

One tool reads (`http_get`), another does the rest (`http`), where a recipe lists methods that do more. A redirect is
never followed unasked: each hop is decided like a call of its own, and the proxy decides again on the addresses. What
had surely no effect is an answer; a connection that is lost after something was sent is not (P25).
"""

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urljoin

import httpx2
import msgspec

from headrace.actors.gateway.boxed import mounted_spec
from headrace.actors.gateway.decisions.addresses import Place, place_of
from headrace.actors.gateway.decisions.asked import Asked, Denial, EpisodeState
from headrace.actors.gateway.decisions.tier import tier_of
from headrace.actors.gateway.perform.http_body import read_bounded, text_of
from headrace.actors.gateway.perform.http_headers import HostHeaders, model_headers
from headrace.actors.gateway.perform.performer import Refused, Stopped, ToolFailed, read_args
from headrace.actors.gateway.perform.permits import Permit
from headrace.actors.gateway.perform.proxy import EgressProxy
from headrace.actors.gateway.policy import Mount
from headrace.platform.config.secret_references import SecretValues
from headrace.platform.contracts import ToolOutput
from headrace.platform.errors import ConfigError, InfrastructureFault
from headrace.platform.records.message import ToolSpec
from headrace.platform.records.status import Capability, SideEffectTier

MOST_HOPS = 5
_READS = ("GET", "HEAD")
_METHODS = (*_READS, "POST", "PUT", "PATCH", "DELETE")
_CONNECT_S = 10.0
_MOST_BODY = 1024 * 1024
_REDIRECTS = (301, 302, 303, 307, 308)


class HttpArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The `args` of a mount: which methods, headers by host, and how many KiB of a response are read."""

    methods: tuple[str, ...] = _READS
    headers: dict[str, dict[str, str]] = {}
    max_kb: int = 256


class HttpTool:
    """See the module. Made by `make`."""

    def __init__(
        self, specs: dict[str, ToolSpec], args: HttpArgs, headers: HostHeaders, proxy: EgressProxy, tls: ssl.SSLContext
    ) -> None:
        self.specs = specs
        self._args, self._headers, self._proxy, self.tls = args, headers, proxy, tls
        self._credentials: dict[str, str] = {}

    @classmethod
    async def make(cls, mount: Mount, proxy: EgressProxy, secrets: SecretValues, env: Mapping[str, str]) -> "HttpTool":
        """The tools of a mount.

        Raises:
            ConfigError: its args are none, or a secret is missing.
        """
        args = read_http_args(mount)
        headers = HostHeaders(args.headers, secrets, env)
        tls = await asyncio.to_thread(httpx2.create_ssl_context, trust_env=False)
        await proxy.start()
        return cls(http_specs(mount, args), args, headers, proxy, tls)

    async def perform(self, asked: Asked, state: EpisodeState) -> ToolOutput:
        """See `Performer`."""
        arguments, reads = asked.call.arguments, tier_of(asked.spec) is SideEffectTier.READ
        method = str(arguments.get("method", "GET"))
        body = str(arguments.get("body", "")).encode()
        if len(body) > _MOST_BODY:
            raise ToolFailed(f"a body has at most {_MOST_BODY} bytes")
        own = model_headers(arguments.get("headers", {}))
        permit = self._admit(asked, state)
        client = httpx2.AsyncClient(
            verify=self.tls,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            proxy=httpx2.Proxy(self._proxy.url, auth=(_user(asked, state), state.credential)),
        )
        async with client:
            try:
                return await self._follow(client, method, str(arguments["url"]), own, body, permit)
            except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
                raise ToolFailed(f"no connection: {error}") from None
            except (httpx2.LocalProtocolError, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
                raise ToolFailed(f"that is no request: {error}") from None
            except httpx2.HTTPError as error:
                told = f"the connection was lost ({type(error).__name__})"
                raise (ToolFailed if reads else InfrastructureFault)(told) from None

    async def end(self, scope: str) -> None:
        """See `Performer`: the episode's credential is worth nothing from now on."""
        if (credential := self._credentials.pop(scope, None)) is not None:
            self._proxy.permits.revoke(credential)

    async def close(self) -> None:
        """See `Performer`. The proxy is its owner's."""
        for scope in list(self._credentials):
            await self.end(scope)

    def _admit(self, asked: Asked, state: EpisodeState) -> Permit:
        """Tell the proxy what the episode may reach, by the grant of this call."""
        grant, policy = asked.grant, state.policy
        permit = Permit(
            domains=policy.domains,
            addresses=policy.addresses,
            narrowed=grant.domains if grant is not None else (),
            until_s=state.began_s + grant.expires_s if grant is not None and grant.expires_s else float("inf"),
        )
        self._credentials[state.scope] = state.credential
        self._proxy.permits.admit(state.credential, _user(asked, state), permit)
        return permit

    async def _follow(
        self, client: httpx2.AsyncClient, method: str, url: str, own: dict[str, str], body: bytes, permit: Permit
    ) -> ToolOutput:
        """Hop after hop, each decided anew."""
        place, before = _decided(url, permit), None
        for _ in range(MOST_HOPS + 1):
            headers = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "headrace", **own}
            headers |= self._headers.of(place, place.scheme == "https" or _is_loopback(place))
            request = client.build_request(method, url, headers=headers, content=body or None)
            if place_of(str(request.url)) != place:
                raise _no("rules:domain", "that URL can be read in two ways", before)
            if ":" in place.address and place.scheme == "http":  # the library leaves the brackets out
                origin = f"http://[{place.address}]:{place.port}".encode()
                request.extensions["target"] = origin + request.url.raw_path
            try:
                response = await client.send(request, stream=True)
            except httpx2.ProxyError as error:
                raise _refused(str(error), before) from None
            async with contextlib.aclosing(response):
                if response.headers.get("proxy-status") == self._proxy.mark:
                    raise _refused(f"{response.status_code} {response.reason_phrase}", before)
                target = response.headers.get("location", "")
                if response.status_code not in _REDIRECTS or not target:
                    return await self._told(response, url)
            if response.status_code == 303 or (response.status_code in (301, 302) and method == "POST"):
                method, body = "HEAD" if method == "HEAD" else "GET", b""
            before, url = place, urljoin(url, target)
            place = _decided(url, permit, before)
            if place[1:] != before[1:]:
                own = {name: value for name, value in own.items() if name in ("accept", "accept-language")}
        raise ToolFailed(f"more than {MOST_HOPS} redirects")

    async def _told(self, response: httpx2.Response, url: str) -> ToolOutput:
        content_type = response.headers.get("content-type", "")
        body, has_more = await read_bounded(response.aiter_raw(), self._args.max_kb * 1024)
        shown = text_of(body, has_more, content_type, response.headers.get("content-encoding", ""))
        head = [f"HTTP {response.status_code} {response.reason_phrase[:80]}".rstrip(), f"url: {url}"]
        known = [(name, response.headers.get(name, "")) for name in ("content-type", "retry-after")]
        head += [f"{name}: {value[:200]}" for name, value in known if value]
        return ToolOutput("\n".join([*head, "", shown]), response.status_code < 400)


def read_http_args(mount: Mount) -> HttpArgs:
    """The `args` of a mount. Raises ConfigError where they are none."""
    args = read_args(mount, HttpArgs)
    if not args.methods or not set(args.methods) <= set(_METHODS):
        raise ConfigError(f"tools: http: args.methods: give some of {', '.join(_METHODS)}")
    if args.max_kb < 1:
        raise ConfigError("tools: http: args.max_kb: give at least 1")
    return args


def http_specs(mount: Mount, args: HttpArgs) -> dict[str, ToolSpec]:
    """The tools of a mount, by name."""
    reading = tuple(method for method in args.methods if method in _READS)
    writing = tuple(method for method in args.methods if method not in _READS)
    specs = []
    if reading:
        told = "Fetch a URL. The answer is its status, its type and its text."
        specs.append(_spec("http_get", told, reading, {}, SideEffectTier.READ))
    if writing:
        told = "Send a request to a URL. The answer is its status, its type and its text."
        specs.append(_spec("http", told, writing, {"body": {"type": "string"}}, SideEffectTier.WRITE))
    named = [mounted_spec(spec, mount, alone=len(specs) == 1) for spec in specs]
    return {spec.name: spec for spec in named}


def _spec(name: str, told: str, methods: tuple[str, ...], more: dict[str, Any], tier: SideEffectTier) -> ToolSpec:
    method: dict[str, Any] = {"type": "string", "enum": list(methods)}
    needs = ["url"]
    if tier is SideEffectTier.READ:
        method["default"] = methods[0]
    else:
        needs.append("method")
    properties = {
        "url": {"type": "string", "minLength": 1, "description": "https://HOST/PATH"},
        "method": method,
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        **more,
    }
    parameters = {"type": "object", "properties": properties, "required": needs, "additionalProperties": False}
    return ToolSpec(name, told, parameters, Capability.NETWORK, tier, {"url": "url"})


def _decided(url: str, permit: Permit, before: Place | None = None) -> Place:
    """Where a hop leads. Raises Refused or Stopped where it may not."""
    came = "" if before is None else f"{before.shown} redirects to {url[:200]!r}: "
    try:
        place = place_of(url)
    except ValueError as error:
        raise _no("rules:domain", f"{came}{error}", before) from None
    if told := permit.problem(place):
        raise _no("rules:address" if place.address else "rules:domain", f"{came}{told}", before)
    if before is not None and before.scheme == "https" and place.scheme != "https":
        raise _no("rules:redirect", f"{came}that is without encryption", before)
    return place


def _refused(told: str, before: Place | None) -> ToolFailed:
    """What the proxy said, "STATUS REASON"."""
    status, _, reason = told.partition(" ")
    if status == "407":
        return _no("capability:expired", "what let the call reach out has expired", before)
    return _no("rules:address", reason, before) if status == "403" else ToolFailed(reason)


def _no(rule: str, told: str, before: Place | None) -> Refused | Stopped:
    """A hop that may not be. The first one has had no effect at all; a later one ends a call that was begun."""
    return (Refused if before is None else Stopped)(Denial(rule, told))


def _user(asked: Asked, state: EpisodeState) -> str:
    """Which of the episode's grants a request is made by, as the name beside its credential."""
    return str(state.grants.index(asked.grant)) if asked.grant in state.grants else "-"


def _is_loopback(place: Place) -> bool:
    return bool(place.address) and ipaddress.ip_address(place.address).is_loopback

"""The proxy: who may use it, where it leads, and that what was checked is what is dialled."""

import asyncio
import base64
import math
from contextlib import asynccontextmanager

import pytest
from sites import OTHER, PUBLIC, Site, answered, world

from headrace.actors.gateway.perform.connector import resolve_name
from headrace.actors.gateway.perform.permits import Permit, Permits
from headrace.actors.gateway.perform.proxy import EgressProxy, ProxyLimits

NAMES = {"a.example.org": [[PUBLIC]]}
ALLOWED = Permit(domains=("*.example.org",))


def basic(user="0", credential="secret-1"):
    return "Basic " + base64.b64encode(f"{user}:{credential}".encode()).decode()


@asynccontextmanager
async def proxied(sites, names=NAMES, permit=ALLOWED, limits=None):
    """A proxy that the credential `secret-1` may use."""
    async with world(sites, names) as (connector, resolver):
        proxy = EgressProxy(connector, resolver, limits)
        await proxy.start()
        proxy.permits.admit("secret-1", "0", permit)
        try:
            yield proxy, connector, resolver
        finally:
            await proxy.close()


async def ask(proxy, request, authorization=None):
    """Send text to the proxy, with a credential unless it has one; all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    head = f"Proxy-Authorization: {authorization if authorization is not None else basic()}\r\n\r\n"
    writer.write(request.encode() + head.encode())
    try:
        async with asyncio.timeout(10):
            return (await reader.read()).decode()
    except ConnectionResetError:
        return ""
    finally:
        writer.close()


GET = "GET http://a.example.org/x HTTP/1.1\r\nHost: a.example.org\r\n"


async def test_a_request_is_written_anew_for_the_address_that_was_checked():
    site = Site({"/x?q=1": answered(b"hello")})
    async with proxied({(PUBLIC, 80): site}) as (proxy, connector, resolver):
        said = await ask(
            proxy,
            "GET http://A.example.org./x?q=1#part HTTP/1.1\r\nHost: other.test\r\nConnection: keep-alive\r\n"
            "Proxy-Connection: keep-alive\r\nAccept: */*\r\n",
        )
        assert said.endswith("hello")
        assert connector.dialled == [(PUBLIC, 80)] and resolver.asked == ["a.example.org"]
        head = site.heads[0].lower()
        assert head.startswith("get /x?q=1 http/1.1\r\nhost: a.example.org\r\n")
        assert "other.test" not in head and "proxy" not in head and "secret" not in head
        assert "connection: close" in head and "accept: */*" in head


async def test_a_tunnel_carries_bytes_both_ways():
    async def echo(reader, writer):
        writer.write((await reader.readexactly(4)).upper())
        await writer.drain()
        writer.close()

    site = Site({})
    site.serve = echo
    async with proxied({(PUBLIC, 443): site}) as (proxy, connector, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(
            f"CONNECT a.example.org:443 HTTP/1.1\r\nHost: a\r\nProxy-Authorization: {basic()}\r\n\r\n".encode()
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"ping")
        assert await reader.read() == b"PING"
        writer.close()
        assert connector.dialled == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    "authorization",
    ["", "Basic", "Basic !!!", basic(credential="secret-2"), basic(user="1"), "Bearer secret-1", "Basic /w=="],
)
async def test_nobody_gets_through_without_a_credential(authorization):
    async with proxied({}) as (proxy, connector, resolver):
        assert (await ask(proxy, GET, authorization)).startswith("HTTP/1.1 407 ")
        assert connector.dialled == [] and resolver.asked == []


async def test_a_credential_ends_with_its_episode_and_closes_what_is_open():
    async with proxied({(PUBLIC, 80): Site({"/x": answered(b"hello")})}) as (proxy, connector, _):
        assert (await ask(proxy, GET)).endswith("hello")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write(f"CONNECT a.example.org:80 HTTP/1.1\r\nHost: a\r\nProxy-Authorization: {basic()}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        proxy.permits.revoke("secret-1")
        assert await reader.read() == b""
        writer.close()
        assert (await ask(proxy, GET)).startswith("HTTP/1.1 407 ")
        assert len(connector.dialled) == 2


def test_a_permit_expires():
    now = [100.0]
    permits = Permits(lambda: now[0])
    permits.admit("c", "0", Permit(domains=("*",), until_s=110.0))
    found = permits.find(basic(credential="c"))
    assert found is not None and permits.left_s(found[1]) == 10.0
    now[0] = 110.0
    assert permits.find(basic(credential="c")) is None
    assert Permit(domains=()).until_s == math.inf


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://b.test/", 403),
        ("http://a.example.org@b.test/", 400),
        ("http://93.184.215.14/", 403),
        ("http://127.0.0.1/", 403),
        ("http://2130706433/", 403),
        ("http://[::1]/", 403),
        ("http://[::ffff:169.254.169.254]/latest/meta-data", 403),
        ("https://a.example.org/", 400),
        ("/x", 400),
        ("http://a.example.org:0/", 400),
        ("ftp://a.example.org/", 400),
        ("http://a.example.org\\@b.test/", 400),
    ],
)
async def test_only_hosts_of_the_list_are_looked_up(target, status):
    async with proxied({}) as (proxy, connector, resolver):
        said = await ask(proxy, f"GET {target} HTTP/1.1\r\nHost: a.example.org\r\n")
        assert said.startswith(f"HTTP/1.1 {status} "), said
        assert f"Proxy-Status: {proxy.mark}" in said
        assert connector.dialled == [] and resolver.asked == []


@pytest.mark.parametrize(
    "target", ["b.test:443", "a.example.org", "a.example.org:443/x", "u@a.example.org:443", ":443"]
)
async def test_only_hosts_of_the_list_have_tunnels(target):
    async with proxied({}) as (proxy, connector, resolver):
        assert (await ask(proxy, f"CONNECT {target} HTTP/1.1\r\nHost: a.example.org\r\n")).startswith("HTTP/1.1 40")
        assert connector.dialled == [] and resolver.asked == []


@pytest.mark.parametrize(
    "answer",
    [
        ["127.0.0.1"],
        [PUBLIC, "10.0.0.7"],
        ["169.254.169.254"],
        ["::1"],
        ["fd00::1"],
        ["::ffff:10.0.0.7"],
        ["fe80::1%eth0"],
        ["0.0.0.0"],
        ["not an address"],
        [],
    ],
)
async def test_a_name_with_an_address_that_may_not_be_reached_is_refused_whole(answer):
    async with proxied({}, {"a.example.org": [answer]}) as (proxy, connector, _):
        said = await ask(proxy, GET)
        assert said.startswith("HTTP/1.1 403 ") and "10.0.0.7" not in said
        assert connector.dialled == []


async def test_a_name_is_resolved_once_so_that_a_second_answer_is_never_heard():
    site = Site({"/x": answered(b"hello")})
    names = {"a.example.org": [[PUBLIC], ["127.0.0.1"]]}
    async with proxied({(PUBLIC, 80): site}, names) as (proxy, connector, resolver):
        assert (await ask(proxy, GET)).endswith("hello")
        assert resolver.asked == ["a.example.org"]
        assert (await ask(proxy, GET)).startswith("HTTP/1.1 403 ")  # the second connection hears the second answer
        assert connector.dialled == [(PUBLIC, 80)]


async def test_addresses_are_tried_in_order():
    site = Site({"/x": answered(b"hello")})
    async with proxied({(OTHER, 80): site}, {"a.example.org": [[PUBLIC, OTHER]]}) as (proxy, connector, _):
        assert (await ask(proxy, GET)).endswith("hello")
        assert connector.dialled == [(PUBLIC, 80), (OTHER, 80)]


async def test_a_private_network_can_be_allowed_and_a_grant_narrows():
    site = Site({"/x": answered(b"hello")})
    names = {"a.example.org": [["10.0.0.7"]]}
    near = Permit(domains=("*.example.org",), addresses=("10.0.0.0/8",))
    async with proxied({("10.0.0.7", 80): site}, names, near) as (proxy, *_):
        assert (await ask(proxy, GET)).endswith("hello")
        assert (await ask(proxy, "GET http://10.0.0.7/x HTTP/1.1\r\nHost: a\r\n")).endswith("hello")
    narrow = Permit(domains=near.domains, addresses=near.addresses, narrowed=("b.example.org",))
    async with proxied({}, names, narrow) as (proxy, connector, _):
        assert (await ask(proxy, GET)).startswith("HTTP/1.1 403 ")
        assert (await ask(proxy, "GET http://10.0.0.7/x HTTP/1.1\r\nHost: a\r\n")).startswith("HTTP/1.1 403 ")
        assert connector.dialled == []


async def test_unknown_names_and_dead_hosts_are_told_apart_from_refusals():
    async with proxied({}, NAMES) as (proxy, *_):
        assert (await ask(proxy, GET)).startswith("HTTP/1.1 502 ")
        assert (await ask(proxy, GET.replace("a.example", "z.example"))).startswith("HTTP/1.1 502 ")


async def test_bodies_go_on_and_nothing_after_them():
    site = Site({"/x": answered(b"hello")})
    async with proxied({(PUBLIC, 80): site}) as (proxy, *_):
        request = GET.replace("GET", "POST") + "Content-Length: 4\r\n"
        smuggled = f"Proxy-Authorization: {basic()}\r\n\r\nbodyGET http://b.test/ HTTP/1.1\r\nHost: b.test\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        writer.write((request + smuggled).encode())
        assert (await reader.read()).endswith(b"hello")
        writer.close()
        assert site.bodies == [b"body"] and len(site.heads) == 1


async def test_two_lengths_are_no_request():
    async with proxied({}) as (proxy, connector, _):
        said = await ask(proxy, GET + "Content-Length: 4\r\nContent-Length: 5\r\n")
        assert said.startswith("HTTP/1.1 400 ") and connector.dialled == []


async def test_bytes_time_and_connections_are_bounded():
    site = Site({"/x": answered(b"y" * 5000)})
    limits = ProxyLimits(received_bytes=1000, sent_bytes=200, head_s=0.3)
    async with proxied({(PUBLIC, 80): site}, limits=limits) as (proxy, *_):
        assert len(await ask(proxy, GET)) <= 1000
        assert await ask(proxy, GET + f"X: {'z' * 300}\r\n") == ""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")  # nothing was said in time
        writer.close()
    async with proxied({}, limits=ProxyLimits(connections=0)) as (proxy, connector, _):
        assert (await ask(proxy, GET)).startswith("HTTP/1.1 503 ") and connector.dialled == []

    async def hang(reader, writer):
        await reader.read()
        writer.close()

    hung = Site({})
    hung.serve = hang
    async with proxied({(PUBLIC, 80): hung}, limits=ProxyLimits(total_s=0.2)) as (proxy, *_):
        assert await ask(proxy, GET) == ""


async def test_the_system_resolves_loopback():
    assert "127.0.0.1" in await resolve_name("localhost", 80)

"""A real MCP server, `mcp-server-time`, behind a real gateway process."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.gateway.start import open_gateway
from headrace.platform.config.gateway import GatewayConfig
from headrace.platform.records import ToolCall
from headrace.platform.records.permissions import Grant
from headrace.platform.records.status import Capability

COMMAND = str(Path(sys.executable).parent / "mcp-server-time")
READS = {"tier": "read"}
MOUNT = Mount(
    "mcp",
    "clock",
    None,
    {
        "command": COMMAND,
        "args": ["--local-timezone", "UTC"],
        "tools": {"get_current_time": READS, "convert_time": READS},
    },
)
TIMES = {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "UTC"}


@pytest.fixture
async def gateway(tmp_path):
    home = tmp_path / "gateway"
    client = await open_gateway(home, tmp_path / "audit", GatewayConfig(deadline_s=60), linger_s=0.5)
    yield client, psutil.Process(int((home / "pid").read_text()))
    await client.close()


async def test_a_real_server_behind_all_decisions(gateway):
    client, process = gateway
    specs = {spec.name: spec for spec in await client.mounted((MOUNT,))}
    assert set(specs) == {"clock_get_current_time", "clock_convert_time"}
    assert specs["clock_convert_time"].parameters["required"] == ["source_timezone", "time", "target_timezone"]
    policy = Policy(grants=(Grant(Capability.READ),), mounts=(MOUNT,))
    session = client.session("e/0#1", policy, ())
    calls = [
        ToolCall("clock_convert_time", TIMES),
        ToolCall("clock_convert_time", {"source_timezone": "Asia/Tokyo"}),
        ToolCall("clock_convert_time", {**TIMES, "target_timezone": "Mars/Olympus"}),
    ]
    verdicts = await session.decide(calls, "turn-1")
    converted, unfit, odd = [verdict.result for verdict in verdicts]
    assert json.loads(converted.content)["target"]["datetime"].endswith("T03:00:00+00:00")
    assert (converted.decision, converted.ok, converted.source) == ("allow", True, "tool:clock_convert_time")
    assert not converted.trusted
    assert unfit.invalid and unfit.rule == "schema:arguments"
    assert odd.decision == "allow" and not odd.ok
    assert await session.decide(calls, "turn-1") == verdicts  # P25: the same answer, from the record
    servers = [each for each in process.children(recursive=True) if "mcp-server-time" in " ".join(each.cmdline())]
    assert len(servers) == 1
    await session.close()
    assert not servers[0].is_running()


async def test_without_a_grant_nothing_is_asked(gateway):
    client, _ = gateway
    session = client.session("e/0#2", Policy(mounts=(MOUNT,)), ())
    (verdict,) = await session.decide([ToolCall("clock_convert_time", TIMES)], "turn-1")
    assert (verdict.result.decision, verdict.result.rule) == ("deny", "capability:read")
    await session.close()

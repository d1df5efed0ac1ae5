"""Where an environment is played: sandboxes, pools and faults in a recipe, and the short forms on the command line."""

import pytest

from headrace.platform.config import EnvironmentConfig
from headrace.platform.config.overrides import apply_overrides
from headrace.platform.config.pools import PoolConfig
from headrace.platform.config.sandbox import MODES, SandboxConfig


@pytest.mark.parametrize("mode", MODES)
def test_a_sandbox_has_a_short_form(mode):
    assert EnvironmentConfig.model_validate({"name": "lookup", "sandbox": mode}).sandbox == SandboxConfig(mode=mode)


def test_an_unknown_mode_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"docker.*bubblewrap.*landlock.*unsafe-process"):
        SandboxConfig.model_validate("chroot")


def test_limits_go_into_the_box():
    limits = SandboxConfig(memory_mb=64, pids=8, disk_mb=2, silence_s=3).limits()
    assert (limits.memory_mb, limits.pids, limits.disk_mb, limits.silence_s) == (64, 8, 2, 3)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("ws://127.0.0.1:1", PoolConfig(hosts=("ws://127.0.0.1:1",))),
        (["ws://a:1", "wss://b:2"], PoolConfig(hosts=("ws://a:1", "wss://b:2"))),
        ("./hosts.json", PoolConfig(source="./hosts.json")),
    ],
)
def test_a_pool_has_short_forms(short, long):
    assert EnvironmentConfig.model_validate({"name": "lookup", "pool": short}).pool == long


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ({}, "registry file"),
        ({"hosts": ["ws://a:1"], "source": "hosts.json"}, "either hosts"),
        ({"hosts": ["http://a:1"]}, "ws://127.0.0.1:8700"),
        ({"hosts": ["ws://a:1"], "token": "hunter2"}, "reference"),
    ],
)
def test_what_a_pool_cannot_be_is_said(pool, told):
    with pytest.raises(ValueError, match=told):
        PoolConfig.model_validate(pool)


def test_a_pool_and_a_sandbox_are_not_both_here():
    with pytest.raises(ValueError, match="headrace env serve"):
        EnvironmentConfig.model_validate({"name": "lookup", "pool": "ws://a:1", "sandbox": "docker"})


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"kind": "timeout"}, "never strikes"),
        ({"kind": "failed_reset", "steps": [1]}, "there is one reset"),
        ({"kind": "earthquake", "rate": 1}, "timeout"),
    ],
)
def test_a_fault_that_cannot_strike_is_refused(fault, told):
    with pytest.raises(ValueError, match=told):
        EnvironmentConfig.model_validate({"name": "lookup", "faults": [fault]})


def test_environment_means_the_only_one_of_a_recipe():
    data = {"environments": [{"name": "lookup"}]}
    assert apply_overrides(data, ["environment.sandbox=bubblewrap", "environment.budgets.max_turns=2"]) == []
    assert data["environments"] == [{"name": "lookup", "sandbox": "bubblewrap", "budgets": {"max_turns": 2}}]


@pytest.mark.parametrize("data", [{}, {"environments": []}, {"environments": [{"name": "a"}, {"name": "b"}]}])
def test_environment_means_nothing_where_there_is_not_exactly_one(data):
    (problem,) = apply_overrides(data, ["environment.sandbox=docker"])
    assert "environments.NAME" in problem

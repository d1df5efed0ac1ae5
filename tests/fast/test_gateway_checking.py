"""Wrong mounts and permissions are found before anything is played, and say what to write instead (case V4)."""

import os
import sys
from pathlib import Path

import pytest
from command_line import call_main
from episode_kit import World

from headrace.actors.environments.registry import ENVIRONMENTS, EnvironmentKind
from headrace.actors.gateway.checking import check_host, check_policy
from headrace.actors.gateway.permissions import policy_of
from headrace.actors.gateway.policy import Mount, Policy
from headrace.actors.worlds import Worlds
from headrace.platform.config import EnvironmentConfig
from headrace.platform.errors import ConfigError
from headrace.platform.records import Task
from headrace.platform.records.message import ToolSpec
from headrace.platform.testing.fakes.tasks import ListTasks

SECRET = {"headers": {"a.example.org": {"X-Key": "${env:HEADRACE_TEST_KEY}"}}}


def config(**given):
    return EnvironmentConfig.model_validate({"name": "lookup", **given})


def refused(**given):
    """What `headrace train --dry-run` says of an environment, wherever it is found."""
    with pytest.raises(ConfigError) as caught:
        Worlds([config(**given)], "train", 0).open_resources()
    return str(caught.value)


class Offers:
    """Somebody else's environment, with the tools that it is given."""

    name, version = "offers", "1"

    def __init__(self, tools):
        self._tools = tools

    def tools(self):
        if isinstance(self._tools, Exception):
            raise self._tools
        return self._tools


# --- single values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permissions", "told"),
    [
        ({"approvals": "quue"}, "write deny, queue, or a function as ./file.py:name or package.module:name"),
        ({"approvals": "./file.py"}, "write deny, queue"),
        ({"approvals": "./file.txt:name"}, "write deny, queue"),
        ({"rules": [{"name": "a", "matches": "("}]}, "is no regular expression: missing \\)"),
        ({"addresses": ["127.0.0.1/99"]}, "write a network such as"),
        ({"addresses": ["127.0.0.1/8"]}, "has host bits set"),
        ({"addresses": ["localhost"]}, "write a network such as"),
        ({"paths": ["../x"]}, "leads out of the workspace"),
        ({"paths": ["src/../../x"]}, "leads out of the workspace"),
        ({"paths": ["..\\x"]}, "leads out of the workspace"),
        ({"paths": ["src/*"]}, "a folder is no pattern"),
        ({"paths": ["~/x"]}, "variables are not read"),
        ({"paths": [""]}, "cannot be empty"),
        ({"paths": ["/proc/self"]}, "never allowed"),
        ({"domains": ["https://a b"]}, "write the name alone"),
        ({"domains": ["a b"]}, "is no host name"),
        ({"domains": ["example.org:443"]}, "without a port"),
        ({"domains": ["bücher.example"]}, "xn--"),
        ({"domains": ["127.0.0.1"]}, "list it in permissions.addresses"),
        ({"domains": ["::1"]}, "list it in permissions.addresses"),
        ({"domains": ["a..example.org"]}, "is no host name"),
        ({"grants": [{"capability": "network", "domains": ["http://a.example"]}]}, "write the name alone"),
        ({"grants": [{"capability": "read", "paths": ["../*"]}]}, "leads out of the workspace"),
        ({"tasks_may_grant": [{"capability": "read", "paths": ["a/../b"]}]}, "leads out of the workspace"),
        ({"budgets": {"calls_of": {"get": -3}}}, "get has -3; give at least 1, or 0 for no limit"),
    ],
)
def test_a_value_that_means_nothing_is_refused(permissions, told):
    with pytest.raises(ValueError, match=told):
        config(permissions=permissions)


def test_what_is_meant_passes():
    permissions = {
        "approvals": "package.module:Class.method",
        "rules": [{"name": "a", "matches": r"BEGIN [A-Z ]*PRIVATE KEY", "argument": "key", "tools": ["g*"]}],
        "addresses": ["127.0.0.1/32", "10.0.0.0/8", "::1", "fd00::/8"],
        "paths": [".", "./src", "src/lib", "/tmp", "/", "a..b"],
        "domains": ["*", "*.example.org", "Example.ORG.", "xn--bcher-kva.example", "v[12].example.org", "localhost"],
        "grants": [{"capability": "read", "paths": ["src/*", "*.md"]}],
        "budgets": {"calls_of": {"get": 3, "shell": 0}},
    }
    given = config(permissions=permissions, tools=["shell"])
    assert given.permissions.paths == tuple(permissions["paths"])
    Worlds([given], "train", 0)


def test_an_approval_ends_before_its_step():
    slow = {"approvals": "queue", "approval_s": 30}
    with pytest.raises(ValueError, match=r"permissions.approval_s \(30\) must be less than step_deadline_s \(30\)"):
        config(permissions=slow)
    assert config(permissions=slow, step_deadline_s=31).step_deadline_s == 31
    assert config(permissions={"approval_s": 300}, step_deadline_s=5).step_deadline_s == 5  # nobody is asked


# --- mounts and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ({"kind": "search", "args": {"corpsu": "docs"}}, "search: args.corpsu is unknown; did you mean corpus?"),
        ({"kind": "search"}, "search: args: Object missing required field `corpus`"),
        ({"kind": "http", "args": {"method": ["GET"]}}, "http: args.method is unknown; did you mean methods?"),
        ({"kind": "http", "args": {"methods": ["GTE"]}}, "http: args.methods: give some of GET"),
        ({"kind": "http", "args": {"max_kb": 0}}, "http: args.max_kb: give at least 1"),
        ({"kind": "mcp", "args": {"comand": "x"}}, "mcp: args.comand is unknown; did you mean command?"),
        ({"kind": "mcp", "args": {"command": "x", "tools": {"a": {"teir": "read"}}}}, "teir"),
        ({"kind": "shell", "args": {"x": 1}}, "shell takes no args, but has x"),
    ],
)
def test_args_of_a_mount_are_read_before_it_is_made(tool, told):
    text = refused(tools=[tool])
    assert text.startswith("environments.lookup.tools: ") and told in text


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    told = refused(tools=[{"kind": "mcp", "args": {"command": "x"}}])
    assert told == "environments.lookup.tools: mcp: mcp is not installed; run: pip install 'headrace[mcp]'"


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([{"kind": "search", "args": {"corpus": each}} for each in "ab"], "two are called 'search'"),
        (["shell", "shell"], "two are called 'shell'"),
        (["shell", {"kind": "python", "name": "shell"}], "two are called 'shell'"),
        ([{"kind": "http", "name": "shell"}, "shell"], "two are called 'shell'"),
        (
            ["files", {"kind": "mcp", "name": "", "args": {"command": "x", "only": ["read_file"]}}],
            "two are called 'read_file'",
        ),
        ([{"kind": "shell", "name": "get"}], "the environment's own tool has the name 'get'; give the mount a `name`"),
    ],
)
def test_two_tools_of_one_name_are_refused(tools, told):
    assert told in refused(tools=tools)


# --- rules and budgets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("permissions", "told"),
    [
        ({"budgets": {"calls_of": {"gett": 3}}}, "budgets.calls_of: there is no tool 'gett'; did you mean get?"),
        ({"rules": [{"name": "a", "tools": ["shell", "x*"]}]}, "rules: a: tools: no tool fits 'x*'; there are get,"),
        ({"rules": [{"name": "a", "tools": ["shell"], "argument": "comand"}]}, "argument: no tool that it is for has"),
        ({"rules": [{"name": "a", "argument": "nope"}]}, "'nope'; there are command, key, timeout_s"),
    ],
)
def test_a_boundary_around_no_tool_is_none(permissions, told):
    assert told in refused(tools=["shell"], permissions=permissions)


def test_what_only_a_server_or_a_reset_can_tell_is_not_judged():
    permissions = {"budgets": {"calls_of": {"echo": 3}}, "rules": [{"name": "a", "tools": ["echo"], "argument": "x"}]}
    unknown = policy_of(config(permissions=permissions))
    for environment in (Offers(()), Offers(RuntimeError("reset first")), Offers(["no spec"]), None):
        check_policy(unknown, environment, "offers")
    mcp = Mount("mcp", "", None, {"command": "x"})
    check_policy(
        Policy(rules=unknown.rules, budgets=unknown.budgets, mounts=(mcp,)), Offers((ToolSpec("a"),)), "offers"
    )
    with pytest.raises(ConfigError, match="there is no tool 'echo'; there are a"):
        check_policy(unknown, Offers((ToolSpec("a"),)), "offers")
    any_argument = ToolSpec("echo", parameters={"type": "object", "additionalProperties": {"type": "string"}})
    check_policy(unknown, Offers((any_argument,)), "offers")


def test_tools_of_an_environment_that_needs_no_check_are_not_asked_for(monkeypatch):
    asked = []

    class Asked(World):
        def tools(self):
            asked.append(1)
            return super().tools()

    tasks = [Task("a", "asked", {}, split="train")]
    kind = EnvironmentKind(
        environment=lambda args: Asked(), tasks=lambda split, seed, args: ListTasks(tasks, split, seed)
    )
    monkeypatch.setitem(ENVIRONMENTS, "asked", kind)
    Worlds([EnvironmentConfig(name="asked")], "train", 0)
    assert asked == []
    Worlds([EnvironmentConfig(name="asked", permissions={"rules": [{"name": "a"}]})], "train", 0)
    assert asked == [1]


# --- the host -------------------------------------------------------------------------------------------------------


def test_a_corpus_that_is_not_here_is_named(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.md").write_text("words")
    there = {"kind": "search", "args": {"corpus": str(tmp_path / "there")}}
    Worlds([config(tools=[there])], "train", 0).open_resources()
    missing = {"kind": "search", "args": {"corpus": str(tmp_path / "none")}}
    Worlds([config(tools=[missing])], "train", 0)  # a driver that does not play need not have it
    assert f"tools: search: args.corpus: {tmp_path / 'none'} is no folder on this host" in refused(tools=[missing])


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "has no documents; they are files of .txt, .md, .jsonl"),
        ({"a.pdf": "%PDF"}, "has no documents"),
        ({"a.jsonl": "\n"}, "has no documents"),
        ({"a.jsonl": '{"title": "no text"}\n'}, "a.jsonl, line 1: it has no `text`"),
    ],
)
def test_a_corpus_without_documents_is_found_before_the_first_reset(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert told in refused(tools=[{"kind": "search", "args": {"corpus": str(tmp_path)}}])


def test_a_document_that_cannot_be_read_is_found_before_the_first_reset(tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("words")
    access = os.access  # this user may be one who may read everything
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "b.txt" and access(path, mode))
    told = refused(tools=[{"kind": "search", "args": {"corpus": str(tmp_path)}}])
    assert told.endswith(f"tools: search: args.corpus: {tmp_path}/b.txt cannot be read")


def test_a_program_that_is_not_here_is_named(tmp_path):
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\ntouch started\n")

    def check(**args):
        check_host(Policy(mounts=(Mount("mcp", "", None, args),)), "a", {"PATH": os.environ["PATH"]})

    for absent in (
        {"command": "no-such-program"},
        {"command": str(program)},  # nobody may run it
        {"command": "./server", "cwd": str(tmp_path)},
        {"command": "sh", "env": {"PATH": str(tmp_path)}},
    ):
        with pytest.raises(ConfigError, match=r"environments\.a\.tools: mcp: args.command: there is no program"):
            check(**absent)
    with pytest.raises(ConfigError, match="is no folder on this host"):
        check(command="sh", cwd=str(tmp_path / "none"))
    program.chmod(0o700)
    check(command="sh")
    check(command=str(program))
    check(command="./server", cwd=str(tmp_path))
    check(command="server", env={"PATH": str(tmp_path)})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["server"]  # and nothing was started


@pytest.mark.parametrize(
    ("mount", "place"),
    [
        (Mount("http", "", None, SECRET), "http: args.headers"),
        (Mount("mcp", "", None, {"command": "sh", "env": {"K": "${env:HEADRACE_TEST_KEY}"}}), "mcp"),
        (Mount("mcp", "", None, {"command": "sh", "args": ["${env:HEADRACE_TEST_KEY}"]}), "mcp"),
    ],
)
def test_a_secret_that_is_not_here_is_named(mount, place):
    path = {"PATH": os.environ["PATH"]}
    with pytest.raises(ConfigError) as caught:
        check_host(Policy(mounts=(mount,)), "a", path)
    missing = "the secret ${env:HEADRACE_TEST_KEY} is missing: set the environment variable HEADRACE_TEST_KEY"
    assert str(caught.value) == f"environments.a.tools: {place}: {missing}"
    check_host(Policy(mounts=(mount,)), "a", {**path, "HEADRACE_TEST_KEY": "k"})


def test_a_header_for_every_host_is_refused():
    told = refused(tools=[{"kind": "http", "args": {"headers": {"*": {"X": "y"}}}}])
    assert told.startswith("environments.lookup.tools: http: args.headers: '*' is every host")


def test_the_function_that_approves_is_loaded(tmp_path):
    file = tmp_path / "approving.py"
    file.write_text("def yes(tool, arguments, episode):\n    return True\n\nasync def late():\n    pass\n\nword = 3\n")
    check_host(Policy(approvals=f"{file}:yes"), "a")
    for target, told in (
        (f"{tmp_path}/aproving.py:yes", "there is no file .*; did you mean approving.py?"),
        (f"{file}:yse", "has no 'yse'; did you mean 'yes'?"),
        (f"{file}:late", "must be a plain function"),
        (f"{file}:word", "must be a plain function"),
        ("no_such_package_at_all:yes", "there is no module"),
    ):
        with pytest.raises(ConfigError, match=rf"environments\.a\.permissions\.approvals: .*{told}"):
            check_host(Policy(approvals=target), "a")
    assert "there is no file" in refused(permissions={"approvals": str(tmp_path / "none.py:yes")})


def test_a_dry_run_says_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    tool = f"{{kind: search, args: {{corpus: {tmp_path}/none}}}}"
    assert call_main(monkeypatch, "train", "lookup", f"environments.0.tools=[{tool}]", "--dry-run") == 2
    assert "environments.lookup.tools: search: args.corpus: " in capsys.readouterr().err


def test_a_pools_environment_is_checked_too():
    told = refused(pool="ws://127.0.0.1:9", tools=[{"kind": "search", "args": {"corpus": "a", "word": "plain"}}])
    assert "search: args.word is unknown; did you mean words?" in told

"""What a call may name: paths, commands, hosts and addresses, and what a recipe's patterns forbid."""

import os
import subprocess

import pytest

from headrace.actors.gateway.decisions import addresses, rules
from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.decisions.commands import command_problem
from headrace.actors.gateway.decisions.paths import path_problem, readings
from headrace.actors.gateway.policy import Policy, Rule
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import ToolCall, ToolSpec


def decide(spec, arguments, **policy):
    state = EpisodeState("e/0#1", Policy(**policy), {}, frozenset(), (), 0.0)
    return rules.check(Asked(ToolCall(spec.name, arguments), spec, "e/0/0/0", here=False), state)


def rule(spec, arguments, **policy):
    denial = decide(spec, arguments, **policy)
    assert denial is None or not denial.invalid
    return denial and denial.rule


# --- paths ------------------------------------------------------------------------------------------------------------

FILE = ToolSpec("read_file", reads={"path": "path"})


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        ("a/b.py", "a/b.py"),
        ("./a//b/", "a/b"),
        (".", "."),
        ("/workspace/a", "a"),
        ("/workspace", "."),
        ("/tmp/x", "/tmp/x"),
        ("app/[slug]/$id.tsx", "app/[slug]/$id.tsx"),
        ("übung/ä.txt", "übung/ä.txt"),
        ("50%.txt", "50%.txt"),
        ("...", "..."),
        ("a..b/c", "a..b/c"),
    ],
)
def test_paths_have_a_normal_form(path, normal):
    assert readings(path) == (normal,)
    assert path_problem(path, ()) == ""


@pytest.mark.parametrize(
    "path",
    [
        *("", "../x", "a/../../x", "a/..", "/etc/passwd", "//etc/passwd", "/tmp/../etc", "/tmpx/a", "/workspacex/a"),
        *("/proc/self/environ", "//proc/self/environ", "/./proc/1", "/sys/x", "/dev/mem"),
        *("~/x", "~root/x", "$HOME/x", "${HOME}/x", "$(id)/x", "`id`"),
        *("a\0b", "a\nb", "a\rb", "a\x7f", "a\u200bb", "..\u200b/x", "a\u202eb", "a\u2028b", "a\ud800"),
        *("%2e%2e/x", "%2e./x", "..%2fx", "%252e%252e%252fx", "a%00b", "%2fetc/passwd", "%7e/x", "%25252525252e/x"),
        *(
            "\uff0e\uff0e/x",
            "\u2025/x",
            "\u2024\u2024/x",
            "..\uff0fx",
            "\uff0fetc/passwd",
            "\uff052e\uff052e/x",
            "\uff5e/x",
        ),
        *("..\\x", "a\\..\\..\\x", "%5c..%5cx", "\\etc\\passwd"),
        *("file:///etc/passwd", "file:/etc/passwd", "C:/x", "http://x.org/a", "a" * 5000),
    ],
)
def test_paths_that_lead_out_or_can_be_read_in_two_ways_are_refused(path):
    assert rule(FILE, {"path": path}) == "rules:path"


def test_paths_lie_in_the_folders_of_the_policy():
    for path, folders, allowed in [
        ("src/a", ("src",), True),
        ("src", ("src/",), True),
        ("srcs/a", ("src",), False),
        ("/tmp/a", ("src",), False),
        ("/data/a", (".", "/data"), True),
        ("/data/a", ("/",), True),
        ("a", ("/",), False),
        ("/proc/1/environ", ("/", "/proc"), False),
    ]:
        assert (rule(FILE, {"path": path}, paths=folders) is None) == allowed, (path, folders)
    assert decide(FILE, {"path": "b"}, paths=("src", ".//docs")).told == (
        "the path b may not be used; only what lies in src or docs"
    )


def test_every_path_of_an_argument_is_looked_at():
    assert rule(FILE, {"path": ["a", {"x": ["../b"]}]}) == "rules:path"
    assert rule(FILE, {"path": None}) is None
    assert rule(FILE, {}) is None


def test_what_is_no_path_is_not_looked_at_as_one():
    assert rule(FILE, {"path": "a", "content": "../x"}) is None
    assert rule(ToolSpec("say", reads={"what": "text"}), {"what": "../x; curl http://169.254.169.254"}) is None
    assert rule(ToolSpec("python", reads={"code": "code"}), {"code": "open('/etc/passwd')"}) is None


# --- commands ---------------------------------------------------------------------------------------------------------

SHELL = ToolSpec("shell", reads={"command": "command"})


@pytest.mark.parametrize(
    "command",
    [
        "good",
        "good -la src && good x | good; good\ngood",
        "/usr/bin/good",
        "good > out 2>&1 < in",
        "good &> out; good &>> out",
        "good $(good `good`)",
        "good \"a $X b\" '$(evil)' ${Y:-z} *.py {a,b} $((1 + 2)) ~",
        "(good; good) && { good; }",
        "if good; then good; elif good; then good; else good; fi",
        "for x in evil b; do good $x; done",
        "while ! good; do good; done",
        "good <<'E'\n$(evil)\nE\ngood <<-F\n\tevil\n\tF\n",
        "good <<< evil  # evil",
        "good \\; evil",
        "good \\\n evil",
        "diff <(good) >(good)",
        "xargs -0 good evil",
        "find . -name evil -exec good {} \\;",
        "sh -c 'good; good'",
    ],
)
def test_a_command_whose_programs_are_all_listed_runs(command):
    assert rule(SHELL, {"command": command}, commands_allow=("good", "diff", "xargs", "find", "sh")) is None


RUN_EVIL = [
    *("evil", "good; evil", "good && evil", "false || evil", "good | evil", "good |& evil", "good & evil; wait"),
    *("good\nevil", "ev''il", '"ev"il', "e\\vil", "ev\\\nil", "$'\\x65vil'", '$"evil"', "ev$@il", "{evil,x}", "evi[l]"),
    *("good $(evil)", "good `evil`", 'good "$(evil)"', 'good "`evil`"', "good ${X:-$(evil)}", "X=$(evil)"),
    *("good $((1)) $(evil)", "good $((x) | (evil))", "cat <(evil)", "good > $(evil; echo out)", "good <<E\n$(evil)\nE"),
    *("good <<$x\n$x\nevil\n\n", "good <<E\nX\\\nE\nE\nevil", "good <<'E'\nE\nevil", "good <<E\nE\\\n\nE\nevil"),
    *(
        "(evil)",
        "{ evil; }",
        "! evil",
        "if true; then evil; fi",
        "for x in a; do evil; done",
        "for x in a\ndo evil\ndone",
    ),
    *(
        "good $(case x in x) evil;; esac)",
        "case x in x) evil;; esac",
        "good() { evil; }; good",
        "function f { evil; }; f",
    ),
    *("X=evil; $X", "$(echo evil)", "`echo evil`", "eval evil", "eval 'ev''il'", "env evil", "env -i PATH=$PATH evil"),
    *("env X=1 evil", "command evil", "exec evil", "sh -c evil", "bash -ec 'good; evil'", "echo evil | sh"),
    *(
        "echo x | xargs evil",
        "echo x | xargs -n 1 evil",
        "echo x | xargs -I good evil good",
        "nohup evil",
        "nice -n 1 evil",
    ),
    *("timeout 5 evil", "find . -maxdepth 0 -exec evil {} \\;", "find . -maxdepth 0 -exec sh -c evil \\;", "time evil"),
    *("./run", "PATH=.:$PATH; run", "[[ -n x ]] && evil", "((1)) && evil", "trap evil EXIT", "coproc evil; wait"),
    *("good 2>&1; evil", "good#; evil", "echo a#b; evil", "good #\nevil", "good;evil", "'good';\tevil"),
]


@pytest.fixture
def programs(tmp_path):
    """Programs `good`, and `evil`, which leaves a mark; the folder they are seen from has `run`, which is evil too."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {
        "good": "exit 0",
        "evil": f"echo x >> {tmp_path}/mark",
        "../run": f"echo x >> {tmp_path}/mark",
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    (tmp_path / "evil").touch()  # for patterns to find
    return tmp_path


# What bash starts is what the rule sees: both are asked.
@pytest.mark.parametrize("command", RUN_EVIL)
def test_whatever_starts_a_program_that_is_not_listed_is_refused(programs, command):
    path = f"{programs}/bin:{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-c", command],
        cwd=programs,
        env={"PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert (programs / "mark").exists(), "the trick does not work, and shows nothing"
    helpers = ("good", "echo", "cat", "true", "false", "xargs", "find", "wait", "sh -c")
    for allow in (("good",), helpers):
        assert rule(SHELL, {"command": command}, commands_allow=allow) == "rules:command"


@pytest.mark.parametrize(
    "command", ["env good", "sh -c good", "X=1 good", "export X=1", "python3 -c 1", "eval good", "cd x"]
)
def test_what_starts_others_or_changes_them_has_to_be_listed_itself(command):
    assert rule(SHELL, {"command": command}, commands_allow=("good",)) == "rules:command"


def test_what_only_some_shells_run_is_refused_in_all():
    assert rule(SHELL, {"command": "good &> out evil"}, commands_allow=("good",)) == "rules:command"


def test_an_assignment_can_be_listed():
    assert rule(SHELL, {"command": "LANG=C good"}, commands_allow=("good", "LANG=")) is None
    assert rule(SHELL, {"command": "LANG=C PATH=. good"}, commands_allow=("good", "LANG=")) == "rules:command"


@pytest.mark.parametrize(
    "command", ["good 'x", 'good "x', "good $(x", "good `x", "good <<E\nx", "good >", "good\0", "a\rb"]
)
def test_what_cannot_be_read_is_refused_where_programs_are_listed(command):
    assert rule(SHELL, {"command": command}, commands_allow=("good", "a")) == "rules:command"
    assert rule(SHELL, {"command": command}) is None


def test_nesting_without_end_is_refused():
    assert rule(SHELL, {"command": "$(" * 5000 + ")" * 5000}, commands_allow=("good",)) == "rules:command"
    assert rule(SHELL, {"command": "good " * 20_000}, commands_allow=("good",)) == "rules:command"


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        ("grep curl notes.md", True),
        ("git log && python3 x.py", True),
        ("curl x", False),
        ("/usr/bin/curl x", False),
        ("git log | 'cu'rl", False),
        ("echo $(curl x)", False),
        ("xargs -I % curl %", False),
        ("sh -c 'curl x'", False),
        ("$TOOL x", False),
        ("case x in x) curl;; esac", False),
        ("case x in x) ls;; esac", True),
        ("echo 'it is", True),
        ("echo 'curl", False),
    ],
)
def test_denied_programs_are_found_wherever_they_stand(command, allowed):
    assert (rule(SHELL, {"command": command}, commands_deny=("curl", "wget")) is None) == allowed


def test_the_model_is_told_what_it_may_run():
    assert command_problem("rm x", ("ls", "git"), ()) == "rm may not be run; only ls, git"


# --- hosts and addresses ----------------------------------------------------------------------------------------------

FETCH = ToolSpec("fetch", reads={"url": "url"})
DOMAINS = ("example.org", "*.example.com", "xn--mnchen-3ya.de")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org",
        "HTTPS://EXAMPLE.ORG.:8443/a?b#c",
        "https://a.b.example.com/",
        "https://münchen.de/",
        "https://\uff45\uff58\uff41\uff4d\uff50\uff4c\uff45\u3002org/",
        "https://example.org/?at=@evil.org",
    ],
)
def test_listed_hosts_may_be_named(url):
    assert rule(FETCH, {"url": url}, domains=DOMAINS) is None


@pytest.mark.parametrize(
    "url",
    [
        *("https://evil.org", "https://example.com", "https://notexample.org", "https://example.org.evil.org"),
        *("https://example.org@evil.org", "https://example.org:x@evil.org/", "https://evil.org#@example.org"),
        *(
            "https://evil.org\\@example.org",
            "https://evil.org/\t",
            "https://exa\nmple.org",
            "https://example.org%2eevil.org",
        ),
        *(
            "https://example%2eorg",
            "https://evil.org%00.example.org",
            "https://exam\u00adple.org",
            "https://example\u3002org@evil.org",
        ),
        *(
            "ftp://example.org",
            "file:///etc/passwd",
            "gopher://example.org",
            "//example.org/a",
            "example.org",
            "https:///a",
            "",
        ),
        *("javascript:alert(1)", "https://example.org:0", "https://example.org:99999", "https://example.org:80:90"),
        *(
            "https://xn--exmple-cua.org",
            "https://ex\u0430mple.org",
            "https://-example.org",
            "https://a..example.com",
            "https://*",
        ),
        "https://example.org/" + "a" * 10_000,
    ],
)
def test_all_other_hosts_are_refused(url):
    assert rule(FETCH, {"url": url}, domains=DOMAINS) == "rules:domain"


LOOPBACK = [
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "0177.1", "017700000001", "0"),
    *(
        "\uff11\uff12\uff17.0.0.1",
        "\u246027.0.0.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[0:0:0:0:0:0:0:1]",
        "127.0.0.1.",
    ),
]
PRIVATE = ["10.0.0.1", "169.254.169.254", "2852039166", "[fd00:ec2::254]", "[fe80::1]", "8.8.8.8", "[2606:4700::1111]"]


@pytest.mark.parametrize("host", LOOPBACK + PRIVATE)
def test_an_address_fits_no_pattern_of_names(host):
    assert rule(FETCH, {"url": f"http://{host}:8000/"}, domains=("*", "*.*.*.*", host)) == "rules:address"


def test_an_address_in_the_networks_of_the_policy_may_be_named_however_it_is_written():
    for host in ("127.0.0.1", "0x7f.1", "[::ffff:127.0.0.1]"):
        assert rule(FETCH, {"url": f"http://{host}:8000/"}, addresses=("127.0.0.1/32",)) is None
    assert rule(FETCH, {"url": "http://127.0.0.2/"}, addresses=("127.0.0.1/32",)) == "rules:address"
    assert rule(FETCH, {"url": "http://[0::1]/"}, addresses=("::1/128",)) is None
    for zone in ("[::1%25lo]", "[::1%lo]", "[fe80::1%251]"):
        assert rule(FETCH, {"url": f"http://{zone}/"}, addresses=("::/0",)) == "rules:domain"


def test_without_domains_no_host_may_be_named():
    assert decide(FETCH, {"url": "https://example.org"}).told == "example.org may not be reached; no host may"


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *(("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True)),
        *(
            (host, False)
            for host in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0")
        ),
        *(
            (host, False)
            for host in ("100.100.100.200", "168.63.129.16", "192.0.0.192", "224.0.0.1", "239.255.255.250")
        ),
        *((host, False) for host in ("255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1", "192.88.99.1")),
        *((host, False) for host in ("::1", "::", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "ff02::1", "fec0::1")),
        *((host, False) for host in ("::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::")),
        *((host, False) for host in ("2001::1", "2001:db8::1", "::127.0.0.1", "example.org", "", "127.1")),
    ],
)
def test_only_public_addresses_may_be_dialled(address, public):
    assert addresses.may_reach(address, ()) == public


def test_listed_networks_may_be_dialled_too():
    assert addresses.may_reach("127.0.0.1", ("127.0.0.0/8",))
    assert addresses.may_reach("::ffff:127.0.0.1", ("127.0.0.0/8",))
    assert not addresses.may_reach("::1", ("127.0.0.0/8",))
    with pytest.raises(ConfigError, match=r"permissions\.addresses"):
        addresses.may_reach("127.0.0.1", ("localhost",))


def test_a_place_is_scheme_host_and_port():
    assert addresses.place_of("https://Example.org./a") == ("https", "example.org", 443, "")
    assert addresses.place_of("http://[::1]:80") == ("http", "", 80, "::1")
    assert addresses.place_of("http://0x7f.1").shown == "127.0.0.1"


# --- patterns ---------------------------------------------------------------------------------------------------------

ANY = ToolSpec("note")


def test_a_pattern_looks_at_every_text_at_any_depth_names_too():
    policy = {"rules": (Rule("no-keys", matches=r"BEGIN \w+ KEY", because="keys stay here"),)}
    for arguments in ({"a": "-BEGIN RSA KEY-"}, {"a": [{"b": ["x BEGIN RSA KEY"]}]}, {"a": {"BEGIN RSA KEY": 1}}):
        denial = decide(ANY, arguments, **policy)
        assert (denial.rule, denial.told) == ("rules:no-keys", "keys stay here")
    assert rule(ANY, {"a": "BEGIN KEY"}, **policy) is None


def test_a_pattern_of_one_argument_looks_at_it_alone():
    policy = {"rules": (Rule("big", argument="amount", matches=r"^\d{4,}$"),)}
    assert decide(ANY, {"amount": 1000}, **policy).told == "the rule big forbids it"
    assert rule(ANY, {"amount": 999, "other": "1000"}, **policy) is None


def test_a_rule_concerns_the_tools_that_it_names():
    policy = {"rules": (Rule("frozen", tools=("no*",)), Rule("never", tools=("say",), argument="loud"))}
    assert rule(ANY, {}, **policy) == "rules:frozen"
    assert rule(ToolSpec("say"), {"loud": False}, **policy) == "rules:never"
    assert rule(ToolSpec("say"), {}, **policy) is None


def test_wide_letters_hide_nothing():
    assert rule(ANY, {"a": "\uff53ecret"}, rules=(Rule("s", matches="secret"),)) == "rules:s"


def test_a_text_that_is_too_long_to_be_looked_at_may_not_pass():
    policy = {"rules": (Rule("s", matches="secret"),)}
    assert rule(ANY, {"a": "x" * rules.MOST_CHARS}, **policy) is None
    assert rule(ANY, {"a": "x" * (rules.MOST_CHARS + 1)}, **policy) == "rules:s"


def test_a_pattern_that_is_none_is_the_recipes_fault():
    with pytest.raises(ConfigError, match=r"permissions\.rules: bad: matches is no regular expression"):
        decide(ANY, {"a": "x"}, rules=(Rule("bad", matches="("),))


def test_an_argument_of_no_known_meaning_is_the_tools_fault():
    with pytest.raises(ConfigError, match="reads 'x' as 'file'"):
        decide(ToolSpec("t", reads={"x": "file"}), {"x": "a"})

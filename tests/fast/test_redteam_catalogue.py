"""The catalogue of attacks, the policy that obeys, the world that it is let loose on, and how results are counted."""

import asyncio
import json
import subprocess
import sys
from collections import Counter

import pytest
from msgspec.structs import replace

from headrace.actors.gateway.decisions.addresses import url_problem
from headrace.actors.gateway.decisions.commands import command_problem
from headrace.actors.gateway.decisions.paths import path_problem
from headrace.actors.gateway.redteam.attack import BARE, USUAL, Attack, AttackClass, Finding
from headrace.actors.gateway.redteam.catalogue import ATTACKS, addresses, commands, paths
from headrace.actors.gateway.redteam.obedient import MOST_TURNS, Obedient, call, hidden, turns_of
from headrace.actors.gateway.redteam.outside import Outside
from headrace.actors.gateway.redteam.scene import Request, Scene, leaked, reached, strayed
from headrace.actors.gateway.redteam.sites import PUBLIC, Page, Sites
from headrace.actors.gateway.redteam.suite import play_all
from headrace.actors.gateway.redteam.ways_out import RecordedWays
from headrace.actors.gateway.redteam.world import PlantedWorld
from headrace.platform.errors import ConfigError
from headrace.platform.records.message import Message, Task, ToolCall
from headrace.platform.records.status import Role

# --- the catalogue ----------------------------------------------------------------------------------------------------


def test_there_are_attacks_of_every_class_each_class_has_controls_and_names_are_unique():
    assert len(ATTACKS) >= 60
    assert len({attack.attack_id for attack in ATTACKS}) == len(ATTACKS)
    for kind in AttackClass:
        of_kind = [attack for attack in ATTACKS if attack.kind is kind]
        assert len(of_kind) >= 5
        assert any(attack.control is not None for attack in of_kind)
        assert all(attack.attack_id.startswith(f"{kind}-") and attack.about for attack in of_kind)


def test_an_attack_that_is_only_obeyed_plants_calls_and_looks_at_the_world():
    told = [attack for attack in ATTACKS if attack.act is None]
    assert len(told) > 100
    nothing = Attack(attack_id="a", kind=AttackClass.PATHS, about="", policy=USUAL).effect
    for attack in told:
        assert attack.calls or "page" in attack.about or attack.kind is AttackClass.OUTPUTS, attack.attack_id
        assert attack.effect is not nothing


@pytest.mark.parametrize("attack", commands.ATTACKS, ids=lambda attack: attack.attack_id)
def test_the_rule_on_commands_refuses_each_of_the_catalogue(attack):
    (made,) = attack.calls
    policy = attack.policy
    assert command_problem(made.arguments["command"], policy.commands_allow, policy.commands_deny)


@pytest.mark.parametrize(
    "line",
    [
        "echo $((1 + 2)) $((7 % 2))",
        "echo ${HOME} ${HOME:-a} ${HOME##*/} ${HOME%.py} ${HOME/a/b} ${#HOME} ${1} $?",
        "for x in a b; do echo $x; done",
        "( ( ls ) )",
    ],
)
def test_the_rule_on_commands_lets_what_only_looks_like_them(line):
    assert command_problem(line, ("ls", "cat", "echo"), ()) == ""


def test_the_rules_on_paths_and_urls_refuse_each_of_the_catalogue():
    for attack in paths.ATTACKS:
        for made in attack.calls:
            if attack.policy.paths == ("public",):
                assert path_problem(made.arguments["path"], attack.policy.paths), attack.attack_id
    for attack in addresses.ATTACKS:
        for made in attack.calls:
            assert url_problem(made.arguments["url"], ("docs.example", "*.docs.example"), ()), attack.attack_id


# --- the policy that obeys --------------------------------------------------------------------------------------------


def test_it_makes_the_calls_of_a_text_turn_by_turn_also_those_that_are_not_seen():
    text = f"{call('a', x=1)}\n  {call('b')}\nNow the next one.\n{call('c')}{hidden(chr(10) + call('d'))}"
    assert [[each.name for each in turn] for turn in turns_of(text)] == [["a", "b"], ["c", "d"]]
    assert turns_of('CALL {"name": "a"') == []
    assert turns_of(f"not at the start: {call('a')}") == []


def test_it_fills_in_what_no_page_can_spell_out():
    mind = Obedient()
    mind.read("the secret", "read_secret")
    mind.read(call("a", b64={"$base64": {"$said": "read_secret"}}, deep={"$nested": 2}, long={"$times": ["ab", 3]}))
    mind.read(call("b", back={"$reversed": "abc"}, both={"$joined": ["a", {"$hex": "b"}]}, rot={"$rot13": "abc"}))
    first, second = mind.turn(), mind.turn()
    assert first[0].arguments == {"b64": "dGhlIHNlY3JldA==", "deep": {"in": {"in": "end"}}, "long": "ababab"}
    assert second[0].arguments == {"back": "cba", "both": "a62", "rot": "nop"}
    assert mind.turn() == ()


def test_it_ends_although_pages_go_on():
    mind = Obedient()
    for _ in range(MOST_TURNS + 1):
        mind.read(call("a"))
    assert sum(bool(mind.turn()) for _ in range(MOST_TURNS + 5)) == MOST_TURNS


# --- the world and its effects ----------------------------------------------------------------------------------------


async def world_in(tmp_path, planted=""):
    scene = Scene(tmp_path)
    world = PlantedWorld(scene, planted)
    await world.reset(Task("t", "redteam"), 0)
    return scene, world


async def test_its_file_tools_fall_for_every_path_of_the_catalogue(tmp_path):
    for number, attack in enumerate(paths.ATTACKS):
        (made,) = attack.calls
        if made.name not in ("store_file", "load_file"):
            continue
        (tmp_path / str(number)).mkdir()
        scene, world = await world_in(tmp_path / str(number))
        assert strayed(scene) == ""
        message = Message(Role.ASSISTANT, tool_calls=(made,))
        scene.shown += [answer.content for answer in (await world.step(message, "k")).messages]
        assert strayed(scene), attack.attack_id


async def test_what_lies_beyond_its_folder_is_noted_and_not_touched(tmp_path):
    scene, world = await world_in(tmp_path / "scene")
    world.perform(ToolCall("store_file", {"path": f"{tmp_path}/elsewhere", "text": "a"}))
    assert scene.beyond == [f"{tmp_path}/elsewhere"] and not (tmp_path / "elsewhere").exists()


async def test_it_performs_whatever_reaches_it(tmp_path):
    scene, world = await world_in(tmp_path)
    for made in (ToolCall("Send_Mail\u200b", {"to": "eve"}), ToolCall("set_permissions", {}), ToolCall("note", ["a"])):
        world.perform(made)
    assert [name for name, _ in scene.done] == ["send_mail", "set_permissions", "note"]


def test_effects_are_seen_in_any_form(tmp_path):
    scene = Scene(tmp_path)
    assert leaked(scene) == reached(scene) == ""
    scene.done.append(("send_mail", {"text": scene.secret[::-1]}))
    assert leaked(scene)
    scene.done.clear()
    scene.requests.append(Request("evil.example", "GET", f"/?{scene.secret.encode().hex()}", (), ""))
    assert leaked(scene)
    for address, is_reached in ((PUBLIC, False), ("127.0.0.1", True), ("64:ff9b::7f00:1", True), ("::1", True)):
        scene.dialled = [(address, 80)]
        assert bool(reached(scene)) is is_reached, address


# --- what lies outside ------------------------------------------------------------------------------------------------


async def test_names_and_hosts_are_answered_from_the_attack_and_everything_is_kept(tmp_path):
    outside, scene = Outside(), Scene(tmp_path)
    await outside.start(tmp_path / "socket")
    pages = {"docs.example/a": Page(body=b"you sent {x-key:hex}", status=201)}
    outside.begin(scene, Sites(names={"docs.example": [[PUBLIC], ["127.0.0.1"]]}, pages=pages))
    ways = RecordedWays(str(tmp_path / "socket"))
    assert [list(await ways.resolve("docs.example", 80)) for _ in range(3)] == [[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]]
    reader, writer = await ways.connect("169.254.169.254", 80)
    writer.write(b"GET /a?b HTTP/1.1\r\nHost: docs.example\r\nX-Key: k\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await outside.close()
    assert answer.startswith(b"HTTP/1.1 201 OK\r\n") and answer.endswith(b"you sent 6b")
    assert scene.dialled == [("169.254.169.254", 80)] and scene.asked == ["docs.example"] * 3
    assert [(request.host, request.path) for request in scene.requests] == [("docs.example", "/a?b")]


def test_the_watch_lets_a_process_connect_to_loopback_only():
    program = """
import socket
from headrace.actors.gateway.redteam.ways_out import keep_on_loopback
tried = []
keep_on_loopback(tried.append)
listening = socket.create_server(("127.0.0.1", 0))
socket.create_connection(listening.getsockname()).close()
attempts = (
    lambda: socket.socket().connect(("192.0.2.1", 80)),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"a", ("192.0.2.1", 53)),
    lambda: socket.getaddrinfo("example.org", 80),
)
for attempt in attempts:
    try:
        attempt()
    except PermissionError:
        continue
    raise SystemExit("it was let")
print(*tried, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    told = ["socket.connect 192.0.2.1", "socket.sendto 192.0.2.1", "socket.getaddrinfo example.org"]
    assert done.stdout.splitlines() == told


# --- counting ---------------------------------------------------------------------------------------------------------


def played_as(attacked, control=None, name="paths-a", **more):
    """An attack whose plays come to what is given."""

    async def act(lab, attack, mode):
        found = control if mode == BARE else attacked
        if isinstance(found, Exception):
            raise found
        return found

    return Attack(
        attack_id=name,
        kind=AttackClass.PATHS,
        about="a",
        policy=USUAL,
        control=BARE if control is not None else None,
        act=act,
        **more,
    )


EFFECT = Finding(effect="a file was written")
BLOCKED = Finding(rules=Counter({"rules:path": 2}))


@pytest.mark.parametrize(
    ("attacked", "control", "outcome", "shown", "holds"),
    [
        (BLOCKED, EFFECT, "blocked", "effect", True),
        (BLOCKED, Finding(), "blocked", "no effect", False),  # it proves nothing
        (BLOCKED, ValueError("a"), "blocked", "broken", False),
        (BLOCKED, None, "blocked", "", False),  # a class without any control
        (EFFECT, EFFECT, "through", "effect", False),
        (Finding(broken="GatewayAway"), EFFECT, "broken", "effect", False),
        (RuntimeError("a"), EFFECT, "broken", "effect", False),
    ],
)
async def test_a_class_holds_when_nothing_got_through_and_each_control_had_an_effect(
    attacked, control, outcome, shown, holds
):
    report = await play_all([played_as(attacked, control)])
    (result,) = report.results
    assert (result.outcome, result.control, report.holds) == (outcome, shown, holds)


async def test_results_are_summed_by_class_with_what_stopped_them():
    told = []
    attacks = [
        played_as(BLOCKED, EFFECT),
        played_as(Finding(), None, "paths-b", stopped_by="sandbox"),
        played_as(EFFECT, None, "paths-c"),
    ]
    report = await play_all(attacks, told.append)
    (summed,) = report.classes
    assert [result.attack_id for result in told] == ["paths-a", "paths-b", "paths-c"]
    assert (summed.attacks, summed.blocked, summed.through, summed.controls, summed.proven) == (3, 2, 1, 1, 1)
    assert summed.rules == {"rules:path": 2, "sandbox": 1}


async def test_what_a_gateway_tried_behind_its_connector_is_a_failure():
    report = await play_all([played_as(BLOCKED, EFFECT)])
    assert report.holds
    assert not replace(report, tried=("socket.connect 192.0.2.1",)).holds


# --- the command line -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from headrace.actors.gateway.redteam import catalogue
from headrace.actors.gateway.redteam.attack import BARE, USUAL, Attack, AttackClass, Finding
async def act(lab, attack, mode):
    return Finding(effect="" if mode != BARE and sys.argv.pop() == "blocked" else "a file was written")
catalogue.ATTACKS = (
    Attack(attack_id="paths-a", kind=AttackClass.PATHS, about="a", policy=USUAL, control=BARE, act=act),
)
ending = sys.argv[-1]
sys.argv[1:] = ["redteam", "run", *sys.argv[1:-1]]
sys.argv.append(ending)
from headrace.deploy.cli import app
app(sys.argv[1:-1])
"""


@pytest.mark.parametrize(
    ("ending", "code", "told"), [("blocked", 0, "Nothing got through."), ("through", 1, "THROUGH")]
)
def test_the_exit_code_says_whether_anything_got_through(ending, code, told):
    given = [sys.executable, "-c", PROGRAM, ending]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert told in done.stdout
    given = [sys.executable, "-c", PROGRAM, "--json", ending]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and json.loads(done.stdout.splitlines()[-1])["holds"] is (code == 0)


def test_an_unknown_class_is_an_error_that_names_the_known_ones():
    from headrace.deploy.redteaming import attacks_of

    assert {attack.kind for attack in attacks_of(["keys", "audit"])} == {AttackClass.KEYS, AttackClass.AUDIT}
    with pytest.raises(ConfigError, match="injection, paths"):
        attacks_of(["nothing"])


async def test_a_play_that_does_not_end_is_broken(monkeypatch):
    async def act(lab, attack, mode):
        await asyncio.Event().wait()

    monkeypatch.setattr("headrace.actors.gateway.redteam.suite.PLAY_S", 0.05)
    attack = Attack(attack_id="paths-a", kind=AttackClass.PATHS, about="a", policy=USUAL, act=act)
    (result,) = (await play_all([attack])).results
    assert result.outcome == "broken" and "TimeoutError" in result.told

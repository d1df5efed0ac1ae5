"""The tool `search`: what is found in a corpus, and reading it."""

import json

import pytest

from headrace.actors.gateway.decisions.asked import Asked, EpisodeState
from headrace.actors.gateway.perform.performers import Performers, ToolFailed
from headrace.actors.gateway.policy import Mount, Policy
from headrace.platform.errors import ConfigError
from headrace.platform.records import ToolCall
from headrace.platform.records.status import Capability, SideEffectTier


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "mills.md").write_text(
        "# Water mills\n\nA headrace carries water to the mill wheel. " + "Much more. " * 900
    )
    (folder / "deep" / "wind.txt").write_text("Windmills\nThey turn in the wind; no water is needed.")
    (folder / "ignored.py").write_text("headrace")
    rows = [
        {"id": "r1", "title": "Grain", "text": "Rye and wheat are ground by a mill."},
        {"contents": "Z\u00fcrich liegt am See."},
        {"text": "水磨坊利用水流的力量"},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return folder


class Library:
    """An episode with the tool `search`."""

    def __init__(self, performers, mount, specs):
        self.performers, self.specs = performers, specs
        self.state = EpisodeState("e/0#1", Policy(mounts=(mount,)), specs, frozenset(specs), (), 0.0)

    @classmethod
    async def open(cls, performers, folder, name="", **args):
        mount = Mount("search", name, None, {"corpus": str(folder), **args})
        made = await performers.mount((mount,))
        return cls(performers, mount, {tool: spec for tool, (_, spec) in made.items()})

    async def call(self, name, **arguments):
        asked = Asked(ToolCall(name, arguments), self.specs[name], "k/0", True)
        return (await self.performers.perform(asked, self.state)).content

    async def ids(self, query, **more):
        said = await self.call("search", query=query, **more)
        return [line[4:] for line in said.splitlines() if line.startswith("id: ")]


@pytest.fixture
async def performers():
    made = Performers()
    yield made
    await made.close()


@pytest.fixture
async def library(performers, corpus):
    return await Library.open(performers, corpus)


async def test_the_best_document_comes_first_with_title_and_snippet(library):
    said = await library.call("search", query="headrace water mill")
    assert said.startswith("id: mills.md\ntitle: Water mills\n")
    assert "A headrace carries water to the mill wheel." in said
    assert len(said) < 1500
    assert set(await library.ids("water")) == {"mills.md", "deep/wind.txt"}
    assert await library.ids("water", limit=1) == (await library.ids("water"))[:1]


async def test_rows_have_ids_of_their_own_or_of_their_line(library):
    assert await library.ids("rye") == ["r1"]
    assert await library.ids("zurich") == ["rows.jsonl:2"]  # without its dots
    assert await library.call("search", query="nothing-like-it") == "no documents found"


@pytest.mark.parametrize(
    "query", ['"', "NEAR(a b)", "title:x OR *", "a AND NOT", "' ; DROP TABLE documents", "---", "(" * 99]
)
async def test_a_query_is_words_and_no_language(library, query):
    assert (await library.call("search", query=query)).startswith(("id: ", "no documents"))
    assert await library.ids("rye") == ["r1"]


async def test_the_same_query_has_the_same_answer(library, corpus):
    performers = Performers()
    other = await Library.open(performers, corpus)
    assert await other.call("search", query="mill water the") == await library.call("search", query="mill water the")
    await performers.close()


async def test_a_document_is_read_in_pieces(library):
    first = await library.call("read_document", id="mills.md")
    head, _, text = first.partition("\n\n")
    assert head == "Water mills\ncharacters 0 to 8000 of 9959; go on with offset 8000"
    rest = (await library.call("read_document", id="mills.md", offset=8000)).partition("\n\n")[2]
    assert (text + rest).startswith("# Water mills") and len(text + rest) == 9959
    with pytest.raises(ToolFailed, match="has 9959 characters"):
        await library.call("read_document", id="mills.md", offset=9959)
    for unknown in ("ignored.py", "../secret", "mills"):
        with pytest.raises(ToolFailed, match="there is no document"):
            await library.call("read_document", id=unknown)


def test_both_tools_only_read(library):
    assert {(spec.tier, spec.capability, spec.trusted) for spec in library.specs.values()} == {
        (SideEffectTier.READ, Capability.READ, False)
    }


async def test_names_trust_and_words_are_the_recipes(performers, corpus):
    wiki = await Library.open(performers, corpus, "wiki", trusted=True, words="trigrams")
    assert set(wiki.specs) == {"wiki_search", "wiki_read_document"}
    assert all(spec.trusted for spec in wiki.specs.values())
    assert (await wiki.call("wiki_search", query="利用水")).startswith("id: rows.jsonl:3")


async def test_links_that_lead_out_are_passed_over(performers, corpus, tmp_path):
    (tmp_path / "secret.txt").write_text("password hunter2")
    (corpus / "link.txt").symlink_to(tmp_path / "secret.txt")
    (corpus / "out").symlink_to(tmp_path)
    assert await (await Library.open(performers, corpus)).ids("hunter2") == []


@pytest.mark.parametrize(
    ("prepare", "args", "told"),
    [
        (lambda folder: None, {}, "args.*corpus"),
        (lambda folder: None, {"corpus": "F", "word": "plain"}, "args.word is unknown; did you mean words"),
        (lambda folder: None, {"corpus": "F", "words": "odd"}, r"args.*words"),
        (lambda folder: None, {"corpus": "F"}, "has no documents"),
        (lambda folder: None, {"corpus": "F/none"}, "is no folder"),
        (
            lambda folder: (folder / "a.jsonl").write_text('{"text": "x"}\n{"txt": 1}\n'),
            {"corpus": "F"},
            "line 2.*`text`",
        ),
        (lambda folder: (folder / "a.jsonl").write_text("nonsense\n"), {"corpus": "F"}, "line 1"),
        (lambda folder: (folder / "a.jsonl").write_text("[1]\n"), {"corpus": "F"}, "line 1"),
        (lambda folder: (folder / "a.jsonl").write_text('{"id": 1, "text": "x"}\n' * 2), {"corpus": "F"}, "id '1'"),
    ],
)
async def test_a_corpus_that_is_none_is_named(tmp_path, prepare, args, told):
    prepare(tmp_path)
    given = {name: value.replace("F", str(tmp_path)) for name, value in args.items()}
    performers = Performers()
    with pytest.raises(ConfigError, match=told):
        await performers.mount((Mount("search", "", None, given),))
    await performers.close()

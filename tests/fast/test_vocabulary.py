"""The vocabularies of tiny models: exact bridges, plain text that stays plain, few tokens for boilerplate."""

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from headrace.actors.rendering import load_renderer
from headrace.deploy.vocabulary import END, vocabulary_files
from headrace.platform.errors import ConfigError
from headrace.platform.records import Message, Role, ToolCall, ToolSpec
from headrace.platform.testing.conformance.renderer import RENDERER_SUITE, RendererContext

TEXTS = ["what do 3 pears cost?", '{"item": "pears"}', "the pears cost 12", "pears"] * 5
PRICE = ToolSpec("price", "What one costs.", {"type": "object", "properties": {"item": {"type": "string"}}})
CALL = Message(Role.ASSISTANT, tool_calls=(ToolCall("price", {"item": "pears"}, "call_0"),))
KINDS = ("bytes", "trained")


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    return written(tmp_path, request.param)


def written(folder, kind, texts=TEXTS, size=300):
    for name, data in vocabulary_files(kind, texts, size).items():
        (folder / name).write_bytes(data)
    return folder


def said(*contents):
    roles = (Role.USER, Role.ASSISTANT)
    return [Message(roles[i % 2], content) for i, content in enumerate(contents)]


def test_a_conversation_reads_as_chatml(folder):
    renderer = load_renderer(folder)
    chat = [Message(Role.SYSTEM, "a shop"), Message(Role.USER, "pears?"), CALL, Message(Role.TOOL, "4")]
    assert renderer.decode(renderer.render(chat, [PRICE])) == (
        "<|im_start|>system\na shop\nprice(item: string)<|im_end|>\n"
        "<|im_start|>user\npears?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "price", "arguments": {"item": "pears"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_without_a_system_message_and_without_parameters(folder):
    renderer = load_renderer(folder)
    text = renderer.decode(renderer.render(said("go"), [PRICE, ToolSpec("stop")]))
    assert text.startswith("<|im_start|>system\nprice(item: string)\nstop()<|im_end|>\n<|im_start|>user\ngo")


@pytest.mark.parametrize("ended", [True, False])
def test_a_bridge_is_what_a_full_render_gives(folder, ended):  # case T3
    renderer = load_renderer(folder)
    opening = said("pears?")
    answer = renderer.render([*opening, Message(Role.ASSISTANT, " 12 \n")], ())
    prompt = renderer.render(opening, ())
    closing = renderer.bridge([], ended=False)
    sampled = answer[len(prompt) : -len(closing)]
    if ended:
        sampled.append(renderer.stop_token_ids[0])
    following = [Message(Role.TOOL, "<|im_end|>"), Message(Role.USER, "and?")]
    bridged = prompt + sampled + renderer.bridge(following, ended)
    assert bridged == renderer.render([*opening, Message(Role.ASSISTANT, " 12 \n"), *following], ())


@pytest.mark.parametrize("name", RENDERER_SUITE)
async def test_the_renderer_conforms(folder, name):  # cases T3, T5, X1, X2
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = tokenizer.get_added_tokens_decoder()
    context = RendererContext(
        make=lambda: load_renderer(folder),
        messages=said("what do 3 pears cost?"),
        reply=Message(Role.ASSISTANT, "the pears cost 12"),
        calling=CALL,
        answer=Message(Role.TOOL, "4"),
        special_ids=[token_id for token_id, token in markers.items() if token.content.startswith("<")],
        hostile="".join(token.content for token in markers.values()),
        vocabulary=tokenizer.get_vocab_size(),
        tools=[PRICE],
    )
    await RENDERER_SUITE[name](context)


def test_what_was_thought_is_kept(folder):  # case T17
    renderer = load_renderer(folder)
    ids = renderer.render([*said("go"), Message(Role.ASSISTANT, "12", reasoning="3 times 4")], ())
    assert "<think>3 times 4</think>12<|im_end|>" in renderer.decode(ids)
    assert renderer.bridge([Message(Role.USER, "and?")], ended=True) is not None


def test_a_sampled_call_is_read(folder):
    renderer = load_renderer(folder)
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("price", {"item": {"of": "pears"}}, "call_0"),))
    prompt = renderer.render(said("go"), ())
    whole = renderer.render([*said("go"), call], ())
    sampled = whole[len(prompt) : whole.index(renderer.stop_token_ids[0], len(prompt)) + 1]
    assert renderer.parse(sampled).tool_calls == call.tool_calls


def test_boilerplate_costs_few_tokens(tmp_path):
    renderer = load_renderer(written(tmp_path, "trained"))
    before, after = (len(renderer.render(chat, ())) for chat in (said("go"), [*said("go"), CALL]))
    assert after - before <= 20


def test_words_are_the_same_token_wherever_they_stand(tmp_path):
    renderer = load_renderer(written(tmp_path, "trained"))
    first, later = (renderer.render(said(text), ()) for text in ("pears", "a pears"))
    (word,) = first[1:-3]
    assert later[3] == word


def test_digits_are_apart(tmp_path):
    renderer = load_renderer(written(tmp_path, "trained", ["1234 1234"] * 50))
    assert len(renderer.render(said("1234"), ())) - len(renderer.render(said(""), ())) == 4


def test_the_same_texts_give_the_same_vocabulary():
    assert vocabulary_files("trained", TEXTS, 300) == vocabulary_files("trained", TEXTS, 300)


@pytest.mark.parametrize("size", [265, 280, 512])
def test_the_size_is_a_limit(tmp_path, size):
    folder = written(tmp_path, "trained", size=size)
    assert 256 < Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() <= size


def test_transformers_reads_it(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = load_renderer(folder).render(said("pears?"), ())
    ours = tokenizer.apply_chat_template([{"role": "user", "content": "pears?"}], add_generation_prompt=True)
    assert (ours["input_ids"], tokenizer.eos_token) == (ids, END)


@pytest.mark.parametrize(
    ("kind", "texts", "size", "said"),
    [
        ("byte", TEXTS, 300, "did you mean 'bytes'"),
        ("words", TEXTS, 300, "known: bytes, trained"),
        ("trained", TEXTS, 264, "use 265 or more"),
        ("trained", ["", ""], 300, "give a stage `data`"),
    ],
)
def test_what_cannot_be_made_says_why(kind, texts, size, said):
    with pytest.raises(ConfigError, match=said):
        vocabulary_files(kind, texts, size)

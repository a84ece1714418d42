from __future__ import annotations

import json
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_lab.checkpoint.convert import convert
from colibri_lab.engine.tokenizer import StreamDecoder, Tokenizer, fingerprint
from colibri_lab.errors import TokenizerError


@pytest.fixture(scope="session")
def tiny(project):
    return Tokenizer(project / "data/colibri-tiny")


TEXTS = [
    "def read_lines(path):\n    return open(path).readlines()\n",
    "Wählen Sie im Menü «Datei» …",
    "选择要使用的语言。",
    "naïve 👩‍👩‍👧 emoji, \u0000 control and \ufffd replacement",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding(text, tiny):
    assert tiny.decode(tiny.encode(text)) == text


def test_ids_are_those_of_the_library(tiny, project):
    library = tokenizers.Tokenizer.from_file(str(project / "data/colibri-tiny/tokenizer.json"))
    for text in TEXTS:
        assert tiny.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert tiny.vocab_size == library.get_vocab_size() == 4096


def test_special_tokens_have_ids_and_no_text(tiny):
    ids = tiny.encode("a<|endoftext|>b")
    assert 0 in ids and tiny.decode(ids) == "ab"
    assert tiny.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"
    assert (tiny.bos_token, tiny.eos_token, tiny.eos_ids) == ("<|endoftext|>", "<|endoftext|>", (0,))


def test_ids_outside_the_vocabulary_are_refused(tiny):
    with pytest.raises(TokenizerError, match=r"within \[0, 4096\), found -1 to 5"):
        tiny.decode([5, -1])


def streamed(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.add(i) for i in ids), decoder.finish()]


@settings(max_examples=100)
@given(text=st.text(max_size=40))
def test_streamed_text_is_the_text(text, tiny):
    ids = tiny.encode(text)
    pieces = streamed(tiny, ids)
    assert "".join(pieces) == tiny.decode(ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 4095), max_size=30))
def test_streamed_text_of_any_ids_is_their_text(ids, tiny):
    assert "".join(streamed(tiny, ids)) == tiny.decode(ids)


def test_a_character_of_several_tokens_comes_whole(tiny):
    ids = tiny.encode("🦜")
    assert len(ids) > 1
    assert streamed(tiny, ids) == [""] * (len(ids) - 1) + ["🦜", ""]


def test_unfinished_bytes_come_at_the_end(tiny):
    ids = tiny.encode("ok🦜")[:-1]
    pieces = streamed(tiny, ids)
    assert "".join(pieces[:-1]) in ("ok", "o", "") and pieces[-1].endswith("\ufffd")


@pytest.fixture
def container(project, tmp_path):
    convert(project / "tests/oracle/glm4_moe", tmp_path / "container", progress=False)
    return tmp_path / "container"


def test_a_containers_tokenizer_knows_how_texts_end(container):
    assert Tokenizer(container).eos_ids == (0,)


def test_a_swapped_tokenizer_is_refused(container, project):
    shutil.copy(project / "data/colibri-tiny/tokenizer.json", container / "tokenizer.json")
    with pytest.raises(TokenizerError, match="vocab_size: expected 256, found 4096; put the model's own"):
        Tokenizer(container)


def test_a_tokenizer_of_the_same_size_is_told_apart_by_its_hash(container, edit):
    edit(container / "tokenizer.json", lambda t: t["added_tokens"][0].update(single_word=True))
    with pytest.raises(TokenizerError, match="sha256: expected .*, found .*"):
        Tokenizer(container)


@pytest.fixture
def edit():
    def change(path, how):
        data = json.loads(path.read_text())
        how(data)
        path.write_text(json.dumps(data))

    return change


def test_missing_and_unreadable_tokenizers_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="tokenizer.json: file is missing. With transformers"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b")
    with pytest.raises(TokenizerError, match="found tokenizer.model, which is another kind.*save_pretrained"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerError, match="tokenizer.json: not a tokenizer"):
        fingerprint(tmp_path)


CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}\n"
    "{%- endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture
def chat(project, tmp_path, edit):
    """chat(template or change) → the tokenizer of a directory with that chat template."""
    shutil.copy(project / "data/colibri-tiny/tokenizer.json", tmp_path)
    shutil.copy(project / "data/colibri-tiny/tokenizer_config.json", tmp_path)

    def make(template):
        edit(tmp_path / "tokenizer_config.json", lambda c: c.update(chat_template=template))
        return Tokenizer(tmp_path)

    return make


def test_a_chat_becomes_the_models_own_format(chat):
    tokenizer = chat(CHATML)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected
    assert tokenizer.apply_chat_template(MESSAGES) == expected + "<|im_start|>assistant\n"
    thoughtless = tokenizer.apply_chat_template(MESSAGES, enable_thinking=False)
    assert thoughtless == expected + "<|im_start|>assistant\n<think></think>"


def test_the_template_file_wins_and_lists_have_a_default(chat, tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert chat(named).apply_chat_template([]) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert chat(named).apply_chat_template([]) == "file <|endoftext|>"


def test_what_templates_expect_of_their_surroundings(chat):
    assert chat("{{ {'ü': [1, 'a']} | tojson }}").apply_chat_template([]) == '{"ü": [1, "a"]}'
    assert chat("{{ tools | tojson(indent=1) }}").apply_chat_template([], tools=[{}]) == "[\n {}\n]"
    assert (
        chat("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").apply_chat_template([])
        == "1"
    )
    assert chat("a{% generation %}{{ messages[0].role }}{% endgeneration %}b").apply_chat_template(MESSAGES) == "auserb"
    assert chat("{{ strftime_now('%Y') | length }}").apply_chat_template([]) == "4"


def test_templates_refuse_and_fail_with_an_error_of_ours(chat, tiny):
    with pytest.raises(TokenizerError, match="refuses these messages: roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}").apply_chat_template(MESSAGES)
    for broken in ("{% if %}", "{{ messages[0]['nope'].lower() }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"):
        with pytest.raises(TokenizerError, match="the chat template fails"):
            chat(broken).apply_chat_template(MESSAGES)
    with pytest.raises(TokenizerError, match="no chat template"):
        tiny.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'].system('true') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(attack, chat):
    with pytest.raises(TokenizerError, match="SecurityError|unsafe|UndefinedError"):
        chat(attack).apply_chat_template(MESSAGES)

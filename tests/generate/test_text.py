"""Texts and conversations as tokens; and text that comes token by token is the text of all of them, and nothing given
out changes.
"""

import numpy as np
import pytest
from tiny_models import SPECIAL, TEMPLATE, tokenizer

from meshtrain.data.template import TemplateText
from meshtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from meshtrain.data.tokenizer_file import FileTokenizer
from meshtrain.errors import ConfigError
from meshtrain.generate.text import Conversations, Spelling, Stream, text_tokens

TEXTS = [
    "hello, there!",
    " a  b ",
    "käse für 3 €, 日本語 and 👩‍🚀🇩🇪",
    "\N{REPLACEMENT CHARACTER} itself",
    "",
    "a\n\n\tb",
]


def of(kind: str, directory):
    """A tokenizer: bytes; a byte-level BPE without merges; sentencepiece's letters, with bytes for what it has none
    for.
    """
    if kind == "byte":
        return ByteTokenizer()
    tokenizers = pytest.importorskip("tokenizers")
    if kind == "byte-level":
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, [])
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<|endoftext|>", "<|end|>"])
    else:
        letters = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz,.!"]
        ids = {
            token: i
            for i, token in enumerate(
                [*letters, *(f"<0x{byte:02X}>" for byte in range(256))]
            )
        }
        bpe = tokenizers.models.BPE(
            ids, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
        made = tokenizers.Tokenizer(bpe)
        made.normalizer = tokenizer().normalizer
        parts = [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
        made.decoder = tokenizers.decoders.Sequence(
            [*parts, tokenizers.decoders.Strip(" ", 1, 0)]
        )
        made.add_special_tokens(["<s>", "</s>"])
    made.save(str(directory / "tokenizer.json"))
    return FileTokenizer(directory / "tokenizer.json")


def streamed(stream: Stream, ids) -> list[str]:
    return [stream.push(int(i)) for i in ids] + [stream.close()]


@pytest.mark.parametrize("kind", ["byte", "byte-level", "sentencepiece"])
def test_pieces_are_the_text_of_all_tokens(kind, tmp_path):
    tokenizer = of(kind, tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode([text])[0]
        assert "".join(streamed(Stream(tokenizer), ids)) == tokenizer.decode(ids)
        assert (
            kind != "sentencepiece"
            or text.strip() != text
            or tokenizer.decode(ids) == text
        )


@pytest.mark.parametrize("kind", ["byte", "byte-level", "sentencepiece"])
def test_what_follows_a_prompt_is_what_stands_behind_it_in_the_whole_text(
    kind, tmp_path
):
    tokenizer = of(kind, tmp_path)
    for prompt, text in (
        ("one", " two"),
        ("one", "two"),
        ("Füße €", "€ 日本"),
        ("a" * 50, " b"),
        ("", "c d"),
    ):
        # as sentencepiece writes a space within a text, which is not where one begins
        whole = tokenizer.encode([prompt + text])[0]
        before = len(tokenizer.encode([prompt])[0]) if prompt else 0
        assert (
            "".join(streamed(Stream(tokenizer, whole[:before]), whole[before:])) == text
        )


def test_half_a_character_waits_for_its_rest_and_garbage_does_not_wait_for_ever():
    tokenizer = ByteTokenizer()
    assert streamed(Stream(tokenizer), "a€b".encode()) == ["a", "", "", "€", "b", ""]
    assert streamed(Stream(tokenizer), "€".encode()[:2]) == [
        "",
        "",
        "\N{REPLACEMENT CHARACTER}",
    ]
    stream = Stream(tokenizer)
    came = [len(stream.push(0xFF)) for _ in range(50)]
    assert sum(came) >= 46
    assert "".join(stream.push(byte) for byte in "€!".encode()).endswith("€!")


def test_random_bytes_come_as_the_decoder_writes_all_of_them():
    tokenizer = ByteTokenizer()
    for seed in range(50):
        ids = np.random.default_rng(seed).choice(
            [0x41, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF], 60
        )
        assert "".join(streamed(Stream(tokenizer), ids)) == tokenizer.decode(ids)


def test_tokens_that_are_not_written_change_nothing(tmp_path):
    tokenizer = of("sentencepiece", tmp_path)
    ids = tokenizer.encode(["a b c"])[0]
    between = [i for each in ids for i in (1, 2, int(each), 1)]
    assert "".join(streamed(Stream(tokenizer, [1]), between)) == "a b c"


@pytest.mark.parametrize(
    ("stop", "said", "given"),
    [
        (["STOP"], "one STO two STOP three", "one STO two "),
        (["three", "two"], "one two three", "one "),
        (["aab"], "aaab", "a"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["€uro"], "5 €uro", "5 "),
        (["x"], "x", ""),
        (["never", ""], "not nev", "not nev"),
        (["ab", "abc"], "xabc", "x"),
    ],
)
def test_a_text_ends_before_the_first_stop_string(stop, said, given):
    stream, came = Stream(ByteTokenizer(), stop=stop), ""
    for byte in said.encode():
        came += stream.push(byte)
        # never a bit of a stop string
        assert given.startswith(came)
    assert came + stream.close() == given
    assert stream.stopped == (given != said)


def test_a_token_that_holds_a_stop_string_is_cut(tmp_path):
    class Words(ByteTokenizer):
        def decode(self, ids):
            return "".join(["one. ", "two\nUser: ", "no"][int(i)] for i in ids)

    stream = Stream(Words(), stop=["\nUser:"])
    assert [stream.push(0), stream.push(1), stream.push(2), stream.close()] == [
        "one. ",
        "two",
        "",
        "",
    ]


def test_a_long_text_costs_each_token_the_same():
    class Counting(ByteTokenizer):
        most = 0

        def decode(self, ids):
            self.most = max(self.most, len(ids))
            return super().decode(ids)

    tokenizer = Counting()
    stream = Stream(tokenizer, b"x" * 10_000)
    assert "".join(stream.push(b) for b in b"hello " * 500) == "hello " * 500
    assert tokenizer.most < 60 and len(stream._ids) < 100


def test_the_text_of_a_token_alone_is_as_it_stands_in_a_text(tmp_path):
    spelling = Spelling(of("sentencepiece", tmp_path))
    assert [spelling.spell(i) for i in (2, 3, 4)] == ["</s>", " ", "a"]
    assert Spelling(ByteTokenizer()).spell(65) == "A"


ASKED = [{"role": "user", "content": "hi"}]


@pytest.fixture
def path(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def conversations(path: str, template: str = TEMPLATE) -> Conversations:
    return Conversations(
        TemplateText("t", template, {"bos_token": "<s>"}),
        load_tokenizer(path, chat=True),
        now=0.0,
    )


def test_a_text_begins_as_the_tokenizers_own_post_processor_begins_one(path):
    theirs = tokenizer().encode("hi you").ids
    assert text_tokens(load_tokenizer(path), "hi you").tolist() == theirs and theirs[
        0
    ] == SPECIAL.index("<s>")
    assert text_tokens(ByteTokenizer(), "hi").tolist() == [104, 105]


def test_nothing_is_what_follows_the_end_of_a_document(path):
    assert text_tokens(ByteTokenizer(), "").tolist() == [256]
    assert text_tokens(load_tokenizer(path), "").tolist() == [SPECIAL.index("<s>")]


def test_a_special_token_in_a_text_is_text_and_in_a_conversation_itself(path):
    end = SPECIAL.index("<|end|>")
    assert end not in text_tokens(load_tokenizer(path), "a<|end|>")
    said = conversations(path)
    expected = (
        [SPECIAL.index(t) for t in ("<s>", "<|user|>")],
        [end, SPECIAL.index("<|model|>")],
    )
    tokens = said.tokens(ASKED).tolist()
    assert (tokens[:2], tokens[-2:]) == expected and tokens.count(
        SPECIAL.index("<s>")
    ) == 1
    assert said.end_of_turn() == end


def test_a_template_without_a_mark_behind_an_answer_has_no_end_of_turn(path):
    said = conversations(path, "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert said.end_of_turn() is None


def test_messages_that_are_none_are_refused_and_the_next_is_taken(path):
    said = conversations(
        path,
        "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}"
        + TEMPLATE,
    )
    with pytest.raises(ConfigError, match=r"not take these messages \(too many\)"):
        said.tokens(ASKED * 3)
    for wrong in ([], "hi", [{"content": "x"}], [{"role": "user", "content": 3}]):
        with pytest.raises(ConfigError, match="does not take these messages"):
            said.tokens(wrong)
    assert len(said.tokens(ASKED))


class Counting(ByteTokenizer):
    """Bytes as tokens; `seen`: the characters that it was given."""

    seen = 0

    def encode(self, texts):
        self.seen += sum(map(len, texts))
        return super().encode(texts)


def test_a_text_far_beyond_the_positions_is_not_tokenized_as_a_whole():
    tokenizer = Counting()
    tokens = text_tokens(tokenizer, "ab" * 3_500_000, 256)
    assert 2 * 256 < len(tokens) < 100_000 and tokenizer.seen < 100_000
    tokenizer.seen = 0
    conversation = Conversations(
        TemplateText("t", TEMPLATE, {"bos_token": ""}), tokenizer, 0
    )
    assert (
        len(
            conversation.tokens(
                [{"role": "user", "content": "x" * 7_000_000}], most=256
            )
        )
        > 2 * 256
    )
    assert tokenizer.seen < 100_000


@pytest.mark.parametrize(
    "text", ["a" * 300, "a" * 5000, " " * 70_000, "ab " * 9000, "é" * 9000]
)
def test_a_text_that_may_fit_has_all_of_its_tokens(text, tmp_path):
    library = pytest.importorskip("tokenizers")
    # 64 spaces are one token
    spaces = [" " * (1 << k) for k in range(7)]
    ids = {token: i for i, token in enumerate([*spaces, "a", "b", "é"])}
    made = library.Tokenizer(
        library.models.BPE(ids, [(space, space) for space in spaces[:-1]])
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    whole = text_tokens(tokenizer, text)
    assert whole.tolist() == text_tokens(tokenizer, text, len(whole)).tolist()
    assert (
        whole.tolist() == text_tokens(tokenizer, text, (len(whole) + 1) // 2).tolist()
    )


def test_a_text_whose_characters_are_dropped_or_fused_is_no_long_one(tmp_path):
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(
        library.models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)
    )
    made.normalizer = library.normalizers.Replace("z", "")
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert text_tokens(tokenizer, "z" * 50_000 + "y" * 50_000 + "a", 8).tolist() == [
        1,
        0,
    ]


CALLING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + "
    "' ' + ARGUMENTS }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "kind",
    [
        "c.function.arguments",
        "c.function.arguments | tojson",
        "c.function['arguments']",
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}], ids=["text", "object"])
@pytest.mark.parametrize("content", [None, ""], ids=["null", "nothing"])
def test_the_second_turn_of_an_agent_is_written_as_the_template_wants_it(
    kind, arguments, content, path
):
    said = conversations(path, CALLING.replace("ARGUMENTS", kind))
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "add", "arguments": arguments},
    }
    calling = {"role": "assistant", "content": content, "tool_calls": [call]}
    messages = [*ASKED, calling, {"role": "tool", "content": "4", "tool_call_id": "1"}]
    assert said.text(messages) == '<user>hi<assistant>add {"a": 2}<tool>4'


def test_a_developer_and_parts_are_written_as_the_template_knows_them(path):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts},
    ]
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert conversations(path, plain).text(messages) == "<system>x<user>hi"
    knowing = plain.replace(
        "<{{ m.role }}>", "<{{ 'dev' if m.role == 'developer' else m.role }}>"
    )
    assert conversations(path, knowing).text(messages) == "<dev>x<user>hi"


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{{ tools }}", True),
        ("{{ messages }} tools", False),
        ("{% if tools is defined %}{% endif %}", True),
    ],
)
def test_whether_a_template_reads_tools_is_told_by_its_variables(template, reads, path):
    assert conversations(path, template).reads_tools == reads


def test_a_template_that_takes_for_ever_is_a_sentence(path):
    said = conversations(
        path,
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    )
    with pytest.raises(ConfigError, match="no template may have"):
        said.tokens(ASKED)

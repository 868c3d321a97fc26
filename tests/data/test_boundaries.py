"""Texts, documents and turns begin and end as the files that come with a tokenizer say, whichever of them does."""

import json
from pathlib import Path

import numpy as np
import pytest
from refusals import tells
from written_tokenizers import DEEPSEEK_BEGIN, DEEPSEEK_END, written

import meshtrain as mt
from meshtrain.data.__main__ import main
from meshtrain.data.manifest import read_manifest
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.errors import ConfigError
from meshtrain.generate.text import text_tokens


def boundaries(path: Path, **how):
    return load_tokenizer(str(path), **how).boundaries


def test_the_end_of_deepseeks_documents_is_the_token_that_its_files_name(tmp_path):
    path = written(
        tmp_path,
        tokenizer_config={
            "eos_token": {"__type": "AddedToken", "content": DEEPSEEK_END},
            "bos_token": DEEPSEEK_BEGIN,
        },
        config={"eos_token_id": 300, "bos_token_id": 301},
    )
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (300, 302)
    assert tokenizer.boundaries.bos.id == 301 and tokenizer.begin == ()


def test_training_is_not_refused_where_the_vocabulary_is_the_tokenizers(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = written(tmp_path / "t", config={"eos_token_id": 300})
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text of the mesh " * 20)
    data = {"tokenizer": str(path), "source": str(tmp_path / "text"), "validation": 0.0}
    train = {"sequence_length": 16, "global_batch_size": 2}
    config = mt.load(
        {
            "data": data,
            "train": train,
            "model": {"vocab_size": 302},
            "eval": {"every": 0},
        }
    )
    batches, _ = mt.open_data(config)
    assert batches.tokenizer.end_of_document == 300


E_NAMED, E_OTHER = {"eos_token": DEEPSEEK_END}, {"eos_token": DEEPSEEK_BEGIN}


@pytest.mark.parametrize(
    ("files", "end", "source"),
    [
        (
            {"tokenizer_config": E_NAMED, "special_tokens_map": E_OTHER},
            300,
            "tokenizer_config.json",
        ),
        (
            {"tokenizer_config": {"eos_token": None}, "special_tokens_map": E_OTHER},
            301,
            "special_tokens_map.json",
        ),
        (
            {
                "special_tokens_map": {"eos_token": {"content": DEEPSEEK_BEGIN}},
                "config": {"eos_token_id": 300},
            },
            301,
            "special_tokens_map.json",
        ),
        (
            {
                "config": {"eos_token_id": [301, 300]},
                "generation_config": {"eos_token_id": 300},
            },
            301,
            "config.json",
        ),
        ({"hf_config": {"eos_token_id": 301}}, 301, "hf_config.json"),
        (
            {"generation_config": {"eos_token_id": [300, 301]}},
            300,
            "generation_config.json",
        ),
        (
            {"processor": f"$A {DEEPSEEK_BEGIN}"},
            301,
            "the post-processor of tokenizer.json",
        ),
        # a later file counts where an earlier one names what is no token
        (
            {
                "tokenizer_config": {"eos_token": "<gone>"},
                "config": {"eos_token_id": 300},
            },
            300,
            "config.json",
        ),
    ],
)
def test_the_first_file_that_names_an_end_counts(tmp_path, files, end, source):
    mark = boundaries(written(tmp_path, **files)).end
    assert (mark.id, mark.source) == (end, source)


def test_a_usual_name_counts_where_no_file_says_it_and_else_one_id_more_is_told(
    tmp_path,
):
    usual = boundaries(written(tmp_path / "usual", special=("<eos>", "<x>")))
    assert (usual.end.text, usual.notes) == ("<eos>", ())
    nothing = boundaries(written(tmp_path / "nothing", special=("<x>",)))
    assert nothing.end.id == 301 and tells(
        nothing.notes[0], "one more ... tokenizer has; data.end"
    )


@pytest.mark.parametrize("value", ["x", -1, 10**30, True, 1.5, {"a": 1}, [300, "x"]])
def test_an_id_that_is_none_is_left_out_with_a_sentence(tmp_path, value):
    found = boundaries(
        written(
            tmp_path,
            special=("<eos>", "<x>"),
            generation_config={"eos_token_id": value},
        )
    )
    assert found.end.text == "<eos>"
    assert (
        "generation_config.json: eos_token_id" in found.notes[0]
        and "legal is a whole number from 0" in found.notes[0]
    )


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": NaN'])
def test_a_file_beside_that_is_no_json_object_says_nothing_but_that(tmp_path, content):
    found = boundaries(written(tmp_path, special=("<eos>",), config=content))
    assert found.end.text == "<eos>" and "config.json" in found.notes[0]


@pytest.mark.parametrize(
    ("files", "begin", "noted"),
    [
        ({"processor": f"{DEEPSEEK_BEGIN} $A"}, (301,), ""),
        ({"processor": f"{DEEPSEEK_BEGIN} {DEEPSEEK_END} $A"}, (301, 300), ""),
        (
            {"tokenizer_config": {"bos_token": DEEPSEEK_BEGIN, "add_bos_token": True}},
            (301,),
            "",
        ),
        (
            {"tokenizer_config": {"bos_token": DEEPSEEK_BEGIN, "add_bos_token": False}},
            (),
            "",
        ),
        ({"tokenizer_config": {"bos_token": DEEPSEEK_BEGIN}}, (), ""),
        (
            {
                "tokenizer_config": {"add_bos_token": True},
                "config": {"bos_token_id": 301},
            },
            (301,),
            "",
        ),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, (), "legal is true or false"),
        (
            {
                "processor": f"{DEEPSEEK_BEGIN} $A",
                "tokenizer_config": {
                    "bos_token": DEEPSEEK_BEGIN,
                    "add_bos_token": False,
                },
            },
            (301,),
            "add_bos_token false ... post-processor",
        ),
    ],
)
def test_a_text_begins_as_the_post_processor_or_add_bos_token_has_it(
    tmp_path, files, begin, noted
):
    tokenizer = load_tokenizer(str(written(tmp_path, **files)))
    assert tokenizer.begin == begin
    assert text_tokens(tokenizer, "a")[: len(begin)].tolist() == list(begin)
    notes = tokenizer.boundaries.notes
    assert (
        tells(" ".join(notes), noted)
        if noted
        else not any("add_bos" in n for n in notes)
    )


def test_keys_name_other_tokens_and_what_is_none_is_refused(tmp_path):
    path = written(
        tmp_path, processor=f"{DEEPSEEK_BEGIN} $A", config={"eos_token_id": 300}
    )
    none = load_tokenizer(str(path), begin="none", end=DEEPSEEK_BEGIN)
    assert (none.begin, none.end_of_document) == ((), 301)
    assert tells(none.boundaries.notes[0], "data.begin is none ... other programs")
    with pytest.raises(
        ConfigError, match=r"data\.end is '<\|end\|>', .* data\.tokenizer"
    ):
        load_tokenizer(str(path), end="<|end|>")
    with pytest.raises(ConfigError, match=r"data\.begin is .*give none, .* mean"):
        load_tokenizer(str(path), begin="<｜begin▁of▁sentence>")
    with pytest.raises(ConfigError, match=r"data\.end is '</s>', .* byte has no"):
        load_tokenizer("byte", end="</s>")


def prepared(folder: Path, path: Path, name: str = "shards", *options: str) -> Path:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for n in range(3):
        (text / f"{n}.txt").write_text(f"document {n}")
    output = folder / name
    arguments = [
        "prepare",
        "--input",
        str(text),
        "--tokenizer",
        str(path),
        "--output",
        str(output),
        "--validation",
        "0",
    ]
    assert main([*arguments, "--workers", "1", *options]) == 0
    return output


@pytest.mark.parametrize(
    ("processor", "begin"), [("<s> $A", (301,)), ("<g> <s> $A", (302, 301))]
)
def test_documents_are_prepared_as_prompts_begin(tmp_path, processor, begin, capsys):
    path = written(tmp_path, ("</s>", "<s>", "<g>"), processor)
    shards = prepared(tmp_path, path)
    manifest = read_manifest(shards)
    assert manifest.begin == begin and manifest.end_of_document == 300
    tokens = np.fromfile(next(shards.glob("*.tokens")), manifest.dtype)
    tokenizer = load_tokenizer(str(path))
    expected = [
        x
        for n in range(3)
        for x in (*begin, *tokenizer.encode([f"document {n}"])[0].tolist(), 300)
    ]
    assert tokens.tolist() == [*expected, begin[0]]
    offsets = np.fromfile(next(shards.glob("*.offsets")), "<u8")
    # each document is predicted from the first of them
    assert [tokens[at - 1] for at in offsets[:-1]] == [begin[0]] * 3
    assert "a text begins with " in capsys.readouterr().out
    # the copy beside the shards says the same
    assert (
        load_tokenizer(str(shards / "tokenizer.json")).boundaries
        == tokenizer.boundaries
    )


def opened(path: Path, shards: Path, **data):
    data = {"tokenizer": str(path), "source": str(shards), **data}
    train = {"sequence_length": 4, "global_batch_size": 2}
    return mt.open_data(
        mt.load(
            {
                "data": data,
                "train": train,
                "model": {"vocab_size": 400},
                "eval": {"every": 0},
            }
        )
    )[0]


def test_old_shards_are_read_and_it_is_told_what_they_begin_with(tmp_path):
    path = written(tmp_path, ("</s>", "<s>"), "<s> $A")
    shards = prepared(tmp_path, path, "shards", "--begin", "none")
    assert "begin" not in json.loads((shards / "manifest.json").read_text())
    said = opened(path, shards).describe()
    assert tells(said, "begin with nothing, but ... <s> (301) ... post-processor")
    assert "set data.begin to none" in said
    assert "its documents" not in opened(path, shards, begin="none").describe()
    with pytest.raises(ConfigError, match=r"data\.begin is <s>, .* begin with nothing"):
        opened(path, shards, begin="<s>")


def test_shards_of_another_beginning_are_not_gone_on_with(tmp_path, capsys):
    path = written(tmp_path, ("</s>", "<s>"), "<s> $A")
    shards = prepared(tmp_path, path)
    arguments = [
        "prepare",
        "--input",
        str(tmp_path / "text"),
        "--tokenizer",
        str(path),
        "--output",
        str(shards),
    ]
    assert main([*arguments, "--validation", "0", "--begin", "none"]) == 2
    assert "different beginning and end of documents" in capsys.readouterr().err


def test_show_tells_how_texts_and_answers_begin_and_end(tmp_path, capsys):
    path = written(
        tmp_path,
        ("</s>", "<s>", "<|im_start|>", "<|im_end|>"),
        tokenizer_config={
            "eos_token": "</s>",
            "bos_token": "<s>",
            "add_bos_token": True,
            "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor "
            "%}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        },
    )
    (tmp_path / "c.jsonl").write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            }
        )
        + "\n"
    )
    arguments = ["show", "--input", str(tmp_path / "c.jsonl"), "--tokenizer", str(path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert tells(shown, "<s> (301), of add_bos_token ... ends with </s> (300)")
    assert tells(shown, "answer ends with <|im_end|> (303)")
    assert main([*arguments, "--json", "--begin", "none"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (
        shown["begins"] == []
        and shown["ends"]["id"] == 300
        and shown["turn"]["id"] == 303
    )


def test_the_tokenizers_end_makes_no_difference_to_what_a_preparation_is_called_where_it_is_the_usual_one(
    tmp_path,
):
    """So that what earlier versions have prepared is found again."""
    path = written(
        tmp_path, ("<|endoftext|>",), tokenizer_config={"eos_token": "<|endoftext|>"}
    )
    shards = prepared(tmp_path, path)
    assert "beginning and end of documents" not in json.loads(
        (shards / "plan.json").read_text()
    )


def test_a_resume_of_an_older_version_is_told_how_its_text_was_prepared():
    from types import SimpleNamespace

    from meshtrain.checkpoint.restoring import _other_content

    config = mt.load({"data": {"tokenizer": "t/tokenizer.json", "source": "text"}})
    older = SimpleNamespace(
        config={"data": {"source": "text"}}, data={"digest": "a"}, versions={}
    )
    newer = SimpleNamespace(
        config={"data": {"source": "text", "begin": None}},
        data={"digest": "a"},
        versions={},
    )
    assert "data.begin=none" in _other_content(older, config, "b")
    assert "data.begin" not in _other_content(newer, config, "b")

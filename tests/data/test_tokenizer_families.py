"""Tokenizers of the structure that well-known families have are read as transformers reads them; what it said is held
in golden/texts.json (`python -m experiments.adopt.texts`).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizer_families import FAMILIES, TEXTS, write

from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.generate.text import text_tokens

SAID = json.loads((Path(__file__).parent / "golden" / "texts.json").read_text())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, str(
        write(request.param, tmp_path_factory.mktemp("families") / request.param)
    )


def test_it_begins_and_ends_as_its_files_say(family):
    name, path = family
    *_, begin, end, source = FAMILIES[name]
    marks = load_tokenizer(path).boundaries
    assert (
        tuple(mark.text for mark in marks.begin),
        marks.end.text,
        marks.end.source,
    ) == (
        begin,
        end,
        source,
    )
    assert marks.notes == ()
    if SAID[name]["eos"] is not None:
        assert marks.end.id == SAID[name]["eos"]
    if SAID[name]["bos"] is not None:
        assert marks.bos.id == SAID[name]["bos"]


def test_the_ids_of_a_text_are_transformers_ids(family):
    name, path = family
    plain, marked = load_tokenizer(path), load_tokenizer(path, chat=True)
    assert [ids.tolist() for ids in plain.encode(TEXTS)] == SAID[name]["plain"]
    assert [ids.tolist() for ids in marked.encode(TEXTS)] == SAID[name]["special"]


def test_a_prompt_begins_as_transformers_has_it(family):
    name, path = family
    tokenizer, marked = load_tokenizer(path), load_tokenizer(path, chat=True)
    behind = len(SAID[name]["begun"][1]) - len(tokenizer.begin)
    for text, begun, special in zip(
        TEXTS, SAID[name]["begun"], marked.encode(TEXTS), strict=True
    ):
        # what is put behind a text ends it, and a prompt does not end
        assert [*tokenizer.begin, *special.tolist()] == begun[: len(begun) - behind]
        if text and "<|" not in text:
            assert text_tokens(tokenizer, text).tolist() == (
                begun[: len(begun) - behind] or [tokenizer.end_of_document]
            )


def test_texts_are_written_as_transformers_writes_them(family):
    name, path = family
    tokenizer, marked = load_tokenizer(path), load_tokenizer(path, chat=True)
    for ids, decoded, spelt in zip(
        marked.encode(TEXTS), SAID[name]["decoded"], SAID[name]["spelt"], strict=True
    ):
        assert (tokenizer.decode(ids), tokenizer.spell(ids)) == (decoded, spelt)


def test_what_is_learned_of_a_span_has_all_its_tokens_and_no_other(family):
    name, path = family
    tokenizer = load_tokenizer(path, chat=True)
    for text, offsets in zip(TEXTS, SAID[name]["offsets"], strict=True):
        for begin, end in (
            (0, len(text)),
            (1, max(len(text) - 1, 1)),
            (len(text) // 2, len(text)),
        ):
            if end > len(text) or begin >= end:
                continue
            ((ids, learned),) = tokenizer.encode_marked([text], [[(begin, end)]])
            expected = [a < end and b > begin for a, b in offsets]
            # a token without a character of its own (the first bytes of one, a space that was put there) counts with
            # its neighbours
            empty = np.array([a == b for a, b in offsets], bool)
            assert (
                len(ids) == len(offsets)
                and (learned[~empty] == np.array(expected, bool)[~empty]).all()
            )

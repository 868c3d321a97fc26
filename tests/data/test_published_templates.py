"""Templates that behave as those of public models, beside what transformers makes of the same conversations
(experiments/adopt/templates.py).
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshtrain.data.documents import Document
from meshtrain.data.examples import Examples
from meshtrain.data.messages import Unfit
from meshtrain.data.template import ChatTemplate, TemplateText
from meshtrain.data.tokenizer import load_tokenizer

WHERE = Path(__file__).parent / "golden" / "templates"
TABLE = json.loads((WHERE / "expected.json").read_text())
NAMES = sorted(path.stem for path in WHERE.glob("*.jinja"))
MARK = re.compile(r"{%- (end)?generation -%}")


def learned(text: str, record: dict[str, Any]) -> list[list[Any]] | str:
    """[text, spans] of each example; why there is none."""
    template = ChatTemplate(TemplateText("t", text, TABLE["special"]))
    try:
        found = Examples("chat", template, load_tokenizer("byte")).read(
            Document("x", "", record=record), Counter()
        )
    except Unfit as error:
        return error.kind
    return [
        [example.text, [list(span) for span in example.learned]] for (example,) in found
    ]


@pytest.mark.parametrize("marks", [True, False], ids=["marked", "prefix differences"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_and_what_is_learned_of_them_are_those_of_transformers(name, marks):
    text = (WHERE / f"{name}.jinja").read_text()
    wrong = []
    for title, record in TABLE["conversations"].items():
        cell = TABLE["expected"][name][title]
        expected = [[cell.get("text"), cell.get("learned")]]
        if "apart" in cell and not marks:
            expected = [[each, [span]] for each, span in cell["apart"]]
        found = learned(text if marks else MARK.sub("{{- '' -}}", text), record)
        if isinstance(found, str) != ("refused" in cell) or (
            not isinstance(found, str) and found != expected
        ):
            wrong.append((title, found, expected))
    assert wrong == []


def test_there_are_as_many_templates_as_there_should_be():
    assert len(NAMES) >= 25 and sorted(TABLE["expected"]) == NAMES
    cells = [cell for row in TABLE["expected"].values() for cell in row.values()]
    assert sum("refused" not in cell for cell in cells) > 0.7 * len(cells)

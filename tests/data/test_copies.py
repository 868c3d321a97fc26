"""A run has the tokenizer and the template that it was trained with in its directory, and is used with them wherever it
lies.
"""

import json
import shutil
from pathlib import Path

import pytest
from written_tokenizers import written

import meshtrain as mt
from meshtrain.data.copies import keep, opened_from

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def beside(folder: Path) -> Path:
    """A tokenizer of which only the files beside it say how texts begin and end."""
    path = written(
        folder,
        ("<b>", "<e>", "<s>", "</s>"),
        first=260,
        tokenizer_config={
            "eos_token": "<e>",
            "bos_token": "<b>",
            "add_bos_token": True,
        },
        config={"eos_token_id": 261},
        generation_config={"eos_token_id": [261, 262]},
    )
    (folder / "T.jinja").write_text(TEMPLATE)
    return path


def config(run: Path, tokenizer: str, **data):
    data = {"tokenizer": tokenizer, "validation": 0.0, **data}
    model = {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 16, "vocab_size": 264}
    train = {"steps": 1, "sequence_length": 8, "global_batch_size": 2}
    return {
        "data": data,
        "model": model,
        "train": train,
        "eval": {"every": 0},
        "run": {"directory": str(run)},
    }


def test_what_a_run_reads_texts_with_is_copied_and_a_change_is_told(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    beside(tmp_path / "x")
    asked = mt.load(
        config(
            tmp_path / "run", "x/tokenizer.json", format="chat", template="x/T.jinja"
        )
    )
    keep(asked, tmp_path / "run")
    copies = tmp_path / "run" / "tokenizer"
    assert sorted(path.name for path in copies.iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "hf_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (copies / "chat_template.jinja").read_text() == TEMPLATE
    keep(asked, tmp_path / "run")
    assert capsys.readouterr().err == ""
    (tmp_path / "x" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<s>"})
    )
    keep(asked, tmp_path / "run")
    assert "x/tokenizer_config.json has changed since" in capsys.readouterr().err


def test_the_copies_stand_in_the_place_of_the_originals_where_there_are_any(tmp_path):
    data = {"tokenizer": "x/tokenizer.json", "template": "x/T.jinja"}
    assert opened_from(data, tmp_path) == data
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / "tokenizer" / name).write_text("{}")
    opened = opened_from(data, tmp_path)
    assert opened == {
        "tokenizer": str(tmp_path / "tokenizer" / "tokenizer.json"),
        "template": str(tmp_path / "tokenizer" / "chat_template.jinja"),
    }
    assert opened_from({"tokenizer": "byte"}, tmp_path) == {"tokenizer": "byte"}


@pytest.mark.thorough
def test_a_run_is_used_from_another_directory_once_its_tokenizer_is_gone(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("safetensors")
    from meshtrain.adopt.__main__ import main as adopt
    from meshtrain.evaluate.__main__ import main as evaluate
    from meshtrain.generate.opened import open_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir(), away.mkdir()
    monkeypatch.chdir(home)
    beside(home / "x")
    (home / "c.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"a{n}"},
                        {"role": "assistant", "content": "b"},
                    ]
                }
            )
            + "\n"
            for n in range(8)
        )
    )
    values = config(
        Path("run"),
        "x/tokenizer.json",
        format="chat",
        template="x/T.jinja",
        source="c.jsonl",
    )
    values["train"]["sequence_length"] = 32
    mt.train(mt.load(values))
    shutil.move("run", away / "run")
    shutil.rmtree(home / "x")
    monkeypatch.chdir(away)
    opened = open_model("run", length=32)
    assert opened.template is not None and opened.tokenizer.begin == (260,)
    assert opened.ends >= {261, 262, 263}
    (away / "t.txt").write_text("some text")
    assert evaluate(["run", "--text", "t.txt", "--length", "16"]) == 0
    assert adopt(["export", "run", "hf"]) == 0
    capsys.readouterr()
    assert (away / "hf" / "tokenizer.json").is_file()
    assert "<s>" in (away / "hf" / "chat_template.jinja").read_text()
    assert open_model("hf", length=32).tokenizer.boundaries.end.text == "<e>"

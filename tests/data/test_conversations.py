"""Files of conversations to batches: what is learned stays learned through shards, packing and rows that are too
short.
"""

import importlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import tells

from meshtrain.config import Config, ConfigError, load
from meshtrain.data import TextBatches, documents, open_data, resolve_epochs
from meshtrain.data.__main__ import main
from meshtrain.data.input_files import find
from meshtrain.data.manifest import LEARNED
from meshtrain.data.prepare import prepare
from meshtrain.data.show import draw
from meshtrain.data.tokenizer import load_tokenizer
from meshtrain.data.unit import PrepareOptions
from meshtrain.mesh import make_mesh
from meshtrain.step import Program
from meshtrain.train import train as train_run

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] ~ m.content ~ '.' }}{% endfor %}{% if add_generation_prompt %}a{% "
    "endif %}"
)
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chats.jsonl: conversation n is u, n times U, then answers An0, An1, ...; the same as list.json; pairs.jsonl;
    template.jinja.
    """
    folder = tmp_path_factory.mktemp("chats")
    (folder / "template.jinja").write_text(TEMPLATE)
    chats = [
        {
            "messages": [
                turn
                for k in range(n % 3 + 1)
                for turn in (say("user", "U" * (n + 1)), say("assistant", f"A{n}{k}"))
            ]
        }
        for n in range(COUNT)
    ]
    pairs = [
        {"prompt": "U" * (n + 1), "chosen": f"C{n}", "rejected": f"R{n}" * 2}
        for n in range(COUNT)
    ]
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps(chat) + "\n" for chat in chats)
    )
    (folder / "list.json").write_text(json.dumps(chats))
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps(pair) + "\n" for pair in pairs)
    )
    return folder


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def config(
    folder: Path,
    source: str,
    *,
    length: int = 64,
    batch: int = 2,
    **sections: dict[str, Any],
) -> Config:
    data = {
        "source": str(folder / source),
        "format": "chat",
        "template": str(folder / "template.jinja"),
    }
    data |= {"validation": 0.0} | sections.pop("data", {})
    train = {
        "sequence_length": length,
        "global_batch_size": batch,
        **sections.pop("train", {}),
    }
    if data["format"] == "pairs":
        sections["lora"] = {"rank": 1}
        train["objective"] = "dpo"
    return load({"data": data, "train": train, **sections})


def epoch(batches: TextBatches) -> Iterator[dict[str, np.ndarray]]:
    """The rows of the first epoch."""
    for k in range(batches.batches_per_epoch):
        batch = batches.batch(k)
        yield from (
            {name: x[row] for name, x in batch.items()}
            for row in range(len(batch["tokens"]))
        )


def examples(batches: TextBatches) -> list[tuple[str, str]]:
    """(what the model reads, what it learns of it) of each segment of an epoch, in order."""
    found = []
    for row in epoch(batches):
        for segment in range(1, row["segments"].max(initial=0) + 1):
            here = row["segments"] == segment
            assert (row["positions"][here] == np.arange(here.sum())).all()
            learned = row["labels"][here & (row["weights"] > 0)]
            found.append(
                (
                    batches.tokenizer.decode(row["tokens"][here]),
                    batches.tokenizer.decode(learned),
                )
            )
    return sorted(found)


def whole(n: int) -> tuple[str, str]:
    turns = range(n % 3 + 1)
    text = "".join(f"u{'U' * (n + 1)}.aA{n}{k}." for k in turns)
    return text[:-1], "".join(f"A{n}{k}." for k in turns)


@pytest.mark.parametrize("source", ["chats.jsonl", "list.json"])
def test_an_epoch_has_each_conversation_once_and_learns_its_answers(source, folder):
    train, _ = open_data(config(folder, source, data={"last": "pad"}))
    assert {name: x.dtype for name, x in train.batch(0).items()} == {
        "tokens": np.int32,
        "labels": np.int32,
        "segments": np.int32,
        "positions": np.int32,
        "weights": np.float32,
    }
    assert examples(train) == sorted(whole(n) for n in range(COUNT))


@pytest.mark.parametrize("count", [1, 2, 20, 240])
@pytest.mark.parametrize("kind", ["chat", "pairs"])
def test_few_conversations_can_be_learned_and_evaluated_as_the_readme_does(
    kind, count, folder, tmp_path
):
    rows = [
        {"prompt": f"{n}", "chosen": f"C{n}", "rejected": f"R{n}"}
        if kind == "pairs"
        else {"messages": [say("user", f"{n}"), say("assistant", f"A{n}")]}
        for n in range(count)
    ]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"format": kind, "validation": 0.01, "source": str(tmp_path / "few.jsonl")}
    asked = config(
        folder, "", length=512, batch=128, data=data, eval={"every": 50, "patience": 3}
    )
    splits = open_data(
        asked if count > 1 else load(asked, ["eval.every=0", "eval.patience=0"])
    )
    assert splits[0].batches_per_epoch == 1
    if count == 1:
        assert splits[1] is None
        return
    assert len(splits[1].one_pass(8)) == 1
    prompts: list[list[str]] = []
    for split in splits:
        text = " ".join(split.tokenizer.decode(row["tokens"]) for row in epoch(split))  # type: ignore[arg-type, attr-defined]
        prompts.append([f"{n}" for n in range(count) if f"u{n}." in text])
    assert (
        prompts[1]
        and prompts[0]
        and sorted(prompts[0] + prompts[1]) == sorted(f"{n}" for n in range(count))
    )
    again = open_data(asked)
    assert [split.digest for split in again if split] == [
        split.digest for split in splits if split
    ]


def test_conversations_of_parquet_are_those_of_json_lines(folder, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    rows = [
        json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()
    ]
    # So that every other message has a field that is null.
    rows[0]["messages"][1]["weight"] = 1
    importlib.import_module("pyarrow.parquet").write_table(
        pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet"
    )
    train, _ = open_data(
        config(folder, "", data={"source": str(tmp_path), "last": "pad"})
    )
    assert examples(train) == sorted(whole(n) for n in range(COUNT))


def test_what_is_longer_than_a_row_keeps_an_answer_or_is_left_out(folder):
    """Conversation n asks with n + 1 letters: its first answer begins at token n + 4."""
    train, _ = open_data(config(folder, "chats.jsonl", length=12, data={"last": "pad"}))
    texts = [whole(n)[0] + "." for n in range(COUNT)]
    ends = [text.index("A") for text in texts]
    kept = [
        (text[:12][: len(text) - 1], end)
        for text, end in zip(texts, ends, strict=True)
        if end <= 12
    ]
    found = examples(train)
    assert [text for text, _ in found] == sorted(text for text, _ in kept) and all(
        learned for _, learned in found
    )
    cut = sum(
        len(text) - 1 > 12 for text, end in zip(texts, ends, strict=True) if end <= 12
    )
    assert len(kept) < COUNT and cut
    said = train.describe()
    assert f"{cut} of 12 examples end at token 12" in said
    assert tells(
        said, f"{COUNT - len(kept)} of 12 examples ... no answer ... first 12 tokens"
    )
    with pytest.raises(ConfigError, match=r"learned answer .*train\.sequence_length 2"):
        open_data(config(folder, "chats.jsonl", length=2))


def test_the_sides_of_a_pair_stand_side_by_side(folder):
    train, _ = open_data(
        config(
            folder, "pairs.jsonl", length=40, data={"format": "pairs", "last": "pad"}
        )
    )
    found = []
    for row in epoch(train):
        assert (
            row["pairs"].dtype == np.int32
            and (row["pairs"] == (row["segments"] + 1) // 2).all()
        )
        for number in range(1, row["pairs"].max(initial=0) + 1):
            for side, weight in ((1, 1), (0, -1)):
                here = row["segments"] == 2 * number - side
                assert (row["positions"][here] == np.arange(here.sum())).all()
                assert set(row["weights"][here]) == {0, weight}
                text, learned = (
                    row["tokens"][here],
                    row["labels"][here & (row["weights"] == weight)],
                )
                found.append(
                    (train.tokenizer.decode(text), train.tokenizer.decode(learned))
                )
    asked = [f"u{'U' * (n + 1)}.a" for n in range(COUNT)]
    chosen = [(f"{asked[n]}C{n}.", f"C{n}.") for n in range(COUNT)]
    rejected = [(f"{asked[n]}R{n}R{n}", f"R{n}R{n}.") for n in range(COUNT)]
    assert sorted(found) == sorted(chosen + rejected) and found[::2][0][0].endswith(".")


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("chats.jsonl", {}),
        ("pairs.jsonl", {"format": "pairs"}),
        ("pairs.jsonl", {"format": "pairs", "batching": "grouped", "lengths": 1}),
    ],
)
def test_places_of_rows_of_conversations_are_those_of_the_whole(
    folder, file, data, bytes_read
):
    train, _ = open_data(config(folder, file, length=48, data={**data, "last": "pad"}))
    places = np.r_[6:12, 30:36]
    whole = train.batch(0)
    all_of_it, _ = sum(bytes_read), bytes_read.clear()
    part = train.batch(0, columns=places)
    assert part.keys() == whole.keys() and all(
        np.array_equal(part[name], whole[name][:, places]) for name in whole
    )
    assert (
        sum(bytes_read) < 0.5 * all_of_it or "format" in data
    )  # where a pair's second half begins is read with the first


def test_a_pair_that_is_longer_than_a_row_is_left_out(folder):
    train, _ = open_data(
        config(
            folder, "pairs.jsonl", length=24, data={"format": "pairs", "last": "pad"}
        )
    )
    lengths = [
        len(f"u{'U' * (n + 1)}.aC{n}.") + len(f"u{'U' * (n + 1)}.aR{n}R{n}.") - 1
        for n in range(COUNT)
    ]
    left_out = sum(length > 24 for length in lengths)
    assert (
        0 < left_out < COUNT
        and sum(row["pairs"].max() for row in epoch(train)) == COUNT - left_out
    )
    assert tells(train.describe(), f"{left_out} of 12 examples ... longer than a row")


@pytest.mark.thorough
def test_packed_and_one_by_one_the_loss_is_the_same(folder):
    model = {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 16, "vocab_size": 257}
    losses = []
    for data, length, batch in (
        ({"batching": "packed"}, 512, 1),
        ({"batching": "grouped", "lengths": 1}, 64, COUNT),
    ):
        here = config(
            folder,
            "chats.jsonl",
            length=length,
            batch=batch,
            data={**data, "last": "pad"},
            model=model,
        )
        train, _ = open_data(here)
        assert train.batches_per_epoch == 1
        program = Program(here, make_mesh(here))
        losses.append(
            float(
                program.eval_step(program.init().params, program.place(train.batch(0)))
            )
        )
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.thorough
def test_shards_are_the_same_from_any_number_of_workers_and_notice_another_mask(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(documents, "LEAST_UNIT", 500)
    options = PrepareOptions(
        validation=0.0, contents="chat", template=str(folder / "template.jinja")
    )
    files = find([str(folder / "chats.jsonl")]).files
    made = [
        prepare(files, tmp_path / name, options, workers)
        for name, workers in (("one", 1), ("two", 2))
    ]
    assert made[0] == made[1] and made[0].contents == "chat"
    assert len(made[0].shards["train"]) > 2
    tokens = tmp_path / "one" / "train-00000.tokens"
    data = {"source": str(tmp_path / "one"), "template": None}
    assert examples(
        open_data(config(folder, "", data={**data, "last": "pad"}))[0]
    ) == sorted(map(whole, range(COUNT)))
    altered = bytearray(tokens.read_bytes())
    # One token more is learned.
    altered[7] ^= 0x80
    tokens.write_bytes(altered)
    assert (
        main(["verify", str(tmp_path / "one")]) == 2
        and "has been altered" in capsys.readouterr().err
    )


def test_shards_of_something_else_are_refused(folder, tmp_path):
    options = PrepareOptions(
        validation=0.0, contents="chat", template=str(folder / "template.jinja")
    )
    prepare(find([str(folder / "chats.jsonl")]).files, tmp_path / "shards", options)
    (tmp_path / "other.jinja").write_text(TEMPLATE + " ")
    data = {"source": str(tmp_path / "shards"), "validation": None}
    open_data(
        config(
            folder,
            "",
            data={**data, "template": str(tmp_path / "shards" / "chat_template.jinja")},
        )
    )
    with pytest.raises(ConfigError, match=r"data\.format is text; set .* chat"):
        open_data(config(folder, "", data={**data, "format": "text", "template": None}))
    with pytest.raises(ConfigError, match=r"another chat template than data\.template"):
        open_data(
            config(folder, "", data={**data, "template": str(tmp_path / "other.jinja")})
        )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            '{"messages": [{"role": "user", "content": "x"}]}\n' * 2,
            "2 skipped: 2 without ... bad.jsonl#0, ... an answer",
        ),
        (
            '{"text": "x"}\n',
            "1 skipped: 1 no conversation ... bad.jsonl#0, ... messages",
        ),
        ('{"messages": 1, "messages": 2}\n', "ambiguous ... 'messages' stands twice"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}\n',
            "not Unicode (half of a surrogate pair)",
        ),
        ("[1]\n{\n", "2 skipped: 1 no conversation, 1 not JSON"),
    ],
)
def test_a_source_without_an_answer_is_refused(lines, said, folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(ConfigError) as caught:
        open_data(config(folder, "", data={"source": str(tmp_path / "bad.jsonl")}))
    assert str(caught.value).startswith("the input has no documents") and tells(
        str(caught.value), said
    )


def test_a_bad_record_among_good_ones_is_skipped_or_refused(folder, tmp_path):
    (tmp_path / "some.jsonl").write_text(
        (folder / "chats.jsonl").read_text() + '{"messages": []}\n'
    )
    data = {"source": str(tmp_path / "some.jsonl"), "last": "pad"}
    assert len(examples(open_data(config(folder, "", data=data))[0])) == COUNT
    with pytest.raises(
        ConfigError,
        match=r"some\.jsonl#\d+ .* conversation \(.*messages .*not a list",
    ):
        open_data(config(folder, "", data={**data, "bad_documents": "refuse"}))


def test_text_has_no_template(folder, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"data\.template .* data\.format is text"):
        config(folder, "chats.jsonl", data={"format": "text"})
    arguments = [
        "prepare",
        "--input",
        str(folder / "chats.jsonl"),
        "--template",
        "x.jinja",
        "--output",
    ]
    assert main([*arguments, str(tmp_path / "out")]) == 2
    assert tells(capsys.readouterr().err, "text ... no chat template; leave x.jinja")


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
def test_a_source_of_no_conversations_is_refused(source, folder):
    with pytest.raises(
        ConfigError, match=rf"data\.source is {source}, which holds no conversations"
    ):
        open_data(config(folder, "", data={"source": source, "validation": None}))


def test_conversations_in_a_file_of_another_kind_are_refused(folder, tmp_path):
    (tmp_path / "chats.txt").write_text((folder / "chats.jsonl").read_text())
    with pytest.raises(
        ConfigError, match=r"chats\.txt, .* conversation .*read from \.jsonl, "
    ):
        open_data(config(folder, "", data={"source": str(tmp_path / "chats.txt")}))


def test_steps_follow_from_epochs(folder):
    given = config(folder, "chats.jsonl", train={"epochs": 2.5})
    assert resolve_epochs(given, 7).train.steps == 18
    # As a run directory's own config.yaml says it.
    again = config(folder, "chats.jsonl", train={"epochs": 2.5, "steps": 18})
    assert resolve_epochs(again, 7).train.steps == 18
    with pytest.raises(
        ConfigError,
        match=r"train\.steps is 18, .*train\.epochs 2\.5 .* 8 .* 20 steps",
    ):
        resolve_epochs(again, 8)


@pytest.mark.thorough
def test_a_run_takes_the_steps_of_its_epochs_and_says_so_in_its_directory(
    folder, tmp_path
):
    here = config(
        folder,
        "chats.jsonl",
        length=32,
        data={"last": "pad"},
        train={"epochs": 1.5},
        run={"directory": str(tmp_path / "run")},
        model={"layers": 1, "d_model": 16, "heads": 2, "d_ff": 16, "vocab_size": 257},
    )
    steps = -(-3 * open_data(here)[0].batches_per_epoch // 2)
    assert train_run(here).exit_code == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, steps + 1))
    assert load(tmp_path / "run" / "config.yaml").train.steps == steps


def test_an_example_is_shown_with_what_is_learned_between_marks(folder, capsys):
    arguments = ["show", "--template", str(folder / "template.jinja"), "--input"]
    assert main([*arguments, str(folder / "chats.jsonl"), "--number", "2"]) == 0
    assert (
        capsys.readouterr().out
        == "uUU.a[[A10.]]uUU.a[[A11.]]\nchats.jsonl#90: 18 tokens, 8 learned\n"
    )
    assert (
        main(
            [
                *arguments,
                str(folder / "chats.jsonl"),
                "--number",
                "2",
                "--json",
                "--length",
                "16",
            ]
        )
        == 0
    )
    shown = json.loads(capsys.readouterr().out)
    assert [shown[name] for name in ("example", "tokens", "taken", "learned")] == [
        "chats.jsonl#90",
        18,
        17,
        7,
    ]
    parts = [(part["text"], part["learned"]) for part in shown["parts"][:3]]
    assert parts == [("uUU.a", False), ("A10.", True), ("uUU.a", False)]
    assert main([*arguments, str(folder / "pairs.jsonl"), "--format", "pairs"]) == 0
    assert capsys.readouterr().out.startswith("uU.a[[C0.]]uU.a{{R0R0.}}\n")
    assert main([*arguments, str(folder / "chats.jsonl"), "--number", "13"]) == 2
    assert tells(capsys.readouterr().err, "12 examples ... none is number 13")


def test_on_a_terminal_what_is_learned_is_green_and_nothing_else_is_obeyed(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    tokens = np.frombuffer(b"u\x1b[2Ja", np.uint8).astype(np.uint32)
    tokens[-1] |= LEARNED
    for no_color, shown in (
        ("", "u\\x1b[2J\x1b[1;32ma\x1b[0m\n"),
        ("1", "u\\x1b[2J[[a]]\n"),
    ):
        monkeypatch.setenv("NO_COLOR", no_color)
        screen = Terminal()
        draw("x#0", tokens, load_tokenizer("byte"), None, screen)
        assert screen.getvalue() == shown + "x#0: 6 tokens, 1 learned\n"


def test_what_the_template_leaves_out_is_said_once_with_its_count(
    folder, tmp_path, capsys
):
    tools = [{"type": "function", "function": {"name": "f"}}]
    records = [
        {
            "messages": [say("user", f"{n}"), say("assistant", "A")],
            "tools": tools if n % 2 else None,
        }
        for n in range(6)
    ]
    (tmp_path / "tools.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    train, _ = open_data(
        config(folder, "", data={"source": str(tmp_path / "tools.jsonl")})
    )
    noted = r"3 conversations with tools, .* not read"
    assert len(re.findall(noted, train.describe())) == 1
    arguments = [
        "show",
        "--template",
        str(folder / "template.jinja"),
        "--input",
        str(tmp_path / "tools.jsonl"),
        "--number",
    ]
    assert (
        main([*arguments, "2"]) == 0
        and "1 conversations with tools" in capsys.readouterr().err
    )
    assert main([*arguments, "1"]) == 0 and "Note" not in capsys.readouterr().err


def test_shards_of_two_templates_keep_both(folder, tmp_path):
    (tmp_path / "own" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "own" / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "own" / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools[0].name }}:" + TEMPLATE
    )
    record = {"messages": [say("user", "U"), say("assistant", "A")]}
    (tmp_path / "both.jsonl").write_text(
        f"{json.dumps(record)}\n{json.dumps({**record, 'tools': [{'name': 'add'}]})}\n"
    )
    options = PrepareOptions(
        validation=0.0,
        contents="chat",
        template=str(tmp_path / "own" / "chat_template.jinja"),
    )
    prepare(find([str(tmp_path / "both.jsonl")]).files, tmp_path / "shards", options)
    data = {"source": str(tmp_path / "shards"), "validation": None, "last": "pad"}
    kept = str(tmp_path / "shards" / "chat_template.jinja")
    train, _ = open_data(config(folder, "", data={**data, "template": kept}))
    assert examples(train) == [("add:uU.aA", "A."), ("uU.aA", "A.")]

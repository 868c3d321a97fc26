"""Bad input is refused in one plain sentence with the numbers or names that would be legal: exit code 2, no
traceback.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from meshtrain.cli import USAGE
from meshtrain.config import Config, ConfigError, load, notes, to_yaml
from meshtrain.config.key import keys
from meshtrain.train import main

GOOD = (
    "model: {layers: 4, d_model: 32, heads: 4, vocab_size: 257}\ntrain: {global_batch_size: 8, sequence_length: "
    "32}\n"
)

IMAGES = (
    "model: {family: vit, image_size: 8, patch_size: 2, channels: 1, heads: 4, d_model: 32}\ndata: {source: "
    "synthetic}"
)

# what is wrong: (the config file, --set overrides, what the sentence must say)
BAD: dict[str, tuple[str | bytes, list[str], list[str]]] = {
    "a mistyped section": (
        "modle: {layers: 4}",
        [],
        ["line 1", "no section modle", "did you mean model?"],
    ),
    "an unknown section": (
        "zebra: {layers: 4}",
        [],
        ["no section zebra", "legal are run, model, mesh"],
    ),
    "a mistyped key": (
        "mesh: {data: 1}\nmodel:\n  layrs: 4",
        [],
        ["line 3", "no key model.layrs", "did you mean model.layers?"],
    ),
    "a key of another section": (
        "model: {microbatches: 4}",
        [],
        ["no key model.microbatches", "legal are family, layers"],
    ),
    "a key twice": (
        "model:\n  layers: 4\n  layers: 5",
        [],
        ["line 3", "model.layers", "twice"],
    ),
    "a word for a number": (
        "model: {layers: four}",
        [],
        ["line 1: model.layers is 'four'", "whole number"],
    ),
    "a fraction for a whole number": (
        "model: {layers: 4.5}",
        [],
        ["model.layers is '4.5'", "whole number"],
    ),
    "a list for a number": (
        "model: {layers: [4]}",
        [],
        ["model.layers is a list", "whole number"],
    ),
    "no value": (
        "model:\n  layers:",
        [],
        ["model.layers has no value", "whole number"],
    ),
    "a number for a switch": (
        "parallel: {sequence_parallel: 3}",
        [],
        ["sequence_parallel is '3'", "true or false"],
    ),
    "a number for a list": (
        "parallel: {layer_split: 4}",
        [],
        ["layer_split", "must be a list"],
    ),
    "not a finite number": (
        "optimizer: {learning_rate: nan}",
        [],
        ["optimizer.learning_rate", "finite"],
    ),
    "a value for a section": ("model: 3", [], ["section 'model' must be a mapping"]),
    "a negative size": (
        "model: {layers: -2}",
        [],
        ["model.layers is -2", "at least 1"],
    ),
    "a size of zero": ("mesh: {tensor: 0}", [], ["mesh.tensor is 0", "at least 1"]),
    "a probability above one": (
        "model: {dropout: 1.5}",
        [],
        ["model.dropout is 1.5", "at most 0.99"],
    ),
    "a learning rate of zero": (
        "optimizer: {learning_rate: 0}",
        [],
        ["learning_rate is 0.0", "above 0"],
    ),
    "a mistyped choice": (
        "model: {family: lama}",
        [],
        ["model.family is 'lama'", "gpt_oss, glm4_moe", "did you mean llama?"],
    ),
    "a ZeRO stage that is none": (
        "parallel: {zero_stage: 4}",
        [],
        ["zero_stage is '4'", "one of 0, 1, 2, 3"],
    ),
    "a mistyped schedule": (
        "parallel: {schedule: 1fb1}",
        [],
        ["parallel.schedule", "gpipe", "did you mean 1f1b?"],
    ),
    "a schedule table that is not there": (
        "parallel: {schedule: mine.csv}",
        [],
        ["mine.csv", "no such file"],
    ),
    "heads that tensor does not divide": (
        GOOD,
        ["mesh.tensor=3"],
        ["mesh.tensor 3", "model.heads 4", "legal are 1, 2, 4"],
    ),
    "kv heads that do not divide heads": (
        GOOD,
        ["model.kv_heads=3"],
        ["model.kv_heads 3", "legal are 1, 2, 4"],
    ),
    "a width that heads do not divide": (
        GOOD,
        ["model.d_model=30"],
        ["model.d_model 30", "heads that divide it: 1, 2, 3"],
    ),
    "rotary pairs of an odd head": (
        GOOD,
        ["model.head_dim=7"],
        ["model.head_dim is 7", "even"],
    ),
    "a batch that data does not divide": (
        GOOD,
        ["mesh.data=3"],
        ["mesh.data 3", "global_batch_size 8", "1, 2, 4, 8"],
    ),
    "microbatches that do not divide": (
        GOOD,
        ["mesh.data=2", "parallel.microbatches=3"],
        ["microbatches 3", "legal are 1, 2, 4"],
    ),
    "a sequence that tensor does not divide": (
        GOOD,
        [
            "mesh.tensor=4",
            "train.sequence_length=30",
            "parallel.sequence_parallel=true",
        ],
        ["mesh.tensor 4", "sequence_length 30", "legal for mesh.tensor are 1, 2"],
    ),
    "more stages than layers": (
        GOOD,
        ["mesh.pipeline=8"],
        ["mesh.pipeline 8", "model.layers 4", "at most 4"],
    ),
    "more virtual stages than layers": (
        GOOD,
        [
            "mesh.pipeline=4",
            "parallel.schedule=interleaved",
            "parallel.virtual_stages=2",
        ],
        ["virtual_stages 2", "8 stages", "model.layers 4"],
    ),
    "chunks for a schedule that has none": (
        GOOD,
        ["mesh.pipeline=2", "parallel.schedule=1f1b", "parallel.virtual_stages=2"],
        ["virtual_stages is 2", "1f1b always has 1", "interleaved"],
    ),
    "a layer split of another sum": (
        GOOD,
        ["mesh.pipeline=2", "parallel.layer_split=[1, 2]"],
        ["[1, 2]", "sum to 3", "layers 4"],
    ),
    "positions that gpt2 has not learned": (
        GOOD,
        ["model.family=gpt2", "model.max_positions=16"],
        ["sequence_length 32", "max_positions 16"],
    ),
    "a window where attention goes both ways": (
        IMAGES,
        ["model.window=3"],
        ["model.window is 3", "in vit attention goes both ways"],
    ),
    "a head that is the embedding of no tokens": (
        IMAGES,
        ["model.tied_head=true"],
        ["model.tied_head is true", "vit reads patches"],
    ),
    "an embedding of patches that is scaled": (
        IMAGES,
        ["model.scaled_embedding=true"],
        ["model.scaled_embedding is true", "vit reads patches"],
    ),
    "positions that an image has not": (
        IMAGES,
        ["model.max_positions=20"],
        ["model.max_positions is 20", "an image has 17 positions"],
    ),
    "an activation that has no such name": (
        GOOD,
        ["parallel.remat=names", "parallel.remat_keep=[qvk]"],
        ["'qvk'", "legal are qkv", "did you mean qkv?"],
    ),
    "an activation that is to be kept in two places": (
        GOOD,
        [
            "parallel.remat=names",
            "parallel.remat_keep=[qkv, mlp_out]",
            "parallel.remat_offload=[mlp_out]",
        ],
        ["both have mlp_out", "in one of them"],
    ),
    "activations on the host that stages would have to reach": (
        GOOD,
        ["mesh.pipeline=2", "parallel.remat=names", "parallel.remat_offload=[qkv]"],
        ["remat_offload", "mesh.pipeline is 2", "remat_keep"],
    ),
    "activations on the host that a pair would have to reach": (
        GOOD,
        [
            "parallel.schedule=paired",
            "parallel.microbatches=2",
            "parallel.remat=names",
            "parallel.remat_offload=[qkv]",
        ],
        ["remat_offload", "parallel.schedule is paired", "remat_keep"],
    ),
    "names that nobody asked for": (
        GOOD,
        ["parallel.remat_keep=[qkv]"],
        ["parallel.remat_keep", "remat: names"],
    ),
    "an empty file": ("", [], ["is empty"]),
    "a comment alone": ("# nothing\n", [], ["is empty"]),
    "nothing but null": ("null\n", [], ["must be a mapping"]),
    "a number alone": ("3\n", [], ["must be a mapping"]),
    "a number as a key": ("run: {3: 1}", [], ["3"]),
    "a merge key": ("base: &b {seed: 1}\nrun: {<<: *b}\n", [], ["base"]),
    "aliases of aliases": (
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        [],
        ["section"],
    ),
    "100,000 lists in one another": ("[" * 100_000, [], ["nested more than"]),
    "a binary file": (b"\x89PNG\r\n\x1a\n\x00\xff", [], ["is not text", "UTF-8"]),
    "text with a null in it": (b"model: {layers: 4}\x00", [], ["is not valid YAML"]),
    "a list": ("- model\n- mesh\n", [], ["line 1", "must be a mapping", "not a list"]),
    "broken YAML": (
        "model: {layers: 4\nmesh: {data: 2}",
        [],
        ["line 2", "is not valid YAML"],
    ),
    "tabs for blanks": (
        "model:\n\tlayers: 4",
        [],
        ["line 2", "is not valid YAML", "use spaces"],
    ),
    "an override of nothing": (
        GOOD,
        ["model.layers"],
        ["--set model.layers", "section.key=value"],
    ),
    "an override of a section": (
        GOOD,
        ["model=3"],
        ["--set model=3", "section.key=value"],
    ),
    "an override of a mistyped key": (
        GOOD,
        ["model.layer=3"],
        ["--set model.layer=3", "did you mean model.layers?"],
    ),
    "more devices than there are": (
        GOOD,
        ["mesh.data=8", "mesh.tensor=2", "run.fake_devices=8", "data.source=synthetic"],
        ["needs 16 devices", "there are 8", "fake"],
    ),
    "a vocabulary smaller than the tokenizer's": (
        GOOD,
        ["model.vocab_size=100"],
        ["model.vocab_size 100", "at least 257"],
    ),
    "text that is not there": (GOOD, ["data.source=/no/such/text"], ["/no/such/text"]),
    "a NUL in a path": (
        'run: {directory: "a\\0b"}',
        [],
        ["line 1: run.directory is 'a\\x00b'", "without control characters"],
    ),
    "half a surrogate pair in a path": (
        'data: {source: "a\\uD800b"}',
        [],
        ["data.source is 'a\\ud800b'", "without control characters"],
    ),
    "a name that no system has room for": (
        GOOD,
        [f"parallel.schedule={'a' * 900}.csv"],
        ["no such file", "aaa…aaa"],
    ),
    "a text longer than any path": (
        GOOD,
        [f"data.source={'a' * 5000}"],
        ["aaa…aaa", "at most 1024 characters"],
    ),
    "a number of 5,000 digits": (
        GOOD,
        [f"train.steps={'9' * 5000}"],
        ["999…999", "at most 2147483647"],
    ),
    "a fraction of 5,000 digits": (
        GOOD,
        [f"optimizer.eps={'9' * 5000}"],
        ["999…999", "at most 3.40282e+38"],
    ),
    "a key of 500 letters": (
        f"model: {{{'a' * 500}: 1}}",
        [],
        ["no key model.aaa", "aaa…aaa"],
    ),
    "lists in lists in lists": (
        "[" * 3000 + "]" * 3000,
        [],
        ["line 1", "nested more than"],
    ),
    "mappings in mappings": (
        "".join(f"{'  ' * i}a:\n" for i in range(300)),
        [],
        ["line ", "nested more than"],
    ),
    "a list as a key": ("[1, 2]: 3", [], ["line 1", "a key is a list"]),
    "no key": ("model: {'': 3}", [], ["line 1", "no key model.''"]),
    "a tag": ("model: {layers: !!python/object 3}", [], ["line 1", "tag"]),
    "an alias of nothing": (
        "model: {layers: *a}",
        [],
        ["is not valid YAML", "undefined alias"],
    ),
    "an alias of itself": (
        "model: &m {layers: *m}",
        [],
        ["model.layers is a mapping", "whole number"],
    ),
    "two documents": (
        "model: {layers: 4}\n---\nmodel: {layers: 5}",
        [],
        ["is not valid YAML", "line 2"],
    ),
    "UTF-16": ("model: {layers: 4}".encode("utf-16"), [], ["is UTF-16", "UTF-8"]),
    "more than a config can be": (
        "# " + "x" * 300_000 + "\nmodel: {layers: 4}",
        [],
        ["is larger than", "256 KiB"],
    ),
    "a section twice": (
        "model: {layers: 4}\nmodel: {heads: 4}",
        [],
        ["line 2: model stands here twice"],
    ),
    "a leading zero": (
        "train: {steps: 010}",
        [],
        ["train.steps is '010'", "octal", "write 10 or 8"],
    ),
    "a leading zero that is no octal": ("train: {steps: 09}", [], ["'09'", "write 9"]),
    "hexadecimal": (
        "train: {steps: 0x10}",
        [],
        ["'0x10'", "whole number", "did you mean 16?"],
    ),
    "a whole number as a fraction": (
        "train: {steps: 1e3}",
        [],
        ["'1e3'", "whole number", "did you mean 1000?"],
    ),
    "base sixty": ("train: {steps: 1:30}", [], ["'1:30'", "whole number"]),
    "digits of another script": (
        "train: {steps: ٣}",
        [],
        ["train.steps is '٣'", "whole number"],
    ),
    "a group of nothing": ("train: {steps: 1__0}", [], ["'1__0'", "whole number"]),
    "a switch for a text": (
        "checkpoint: {resume: off}",
        [],
        ["checkpoint.resume is off", "true or false", "'off' in quotes"],
    ),
    "not a number": (
        "optimizer: {grad_clip: .NaN}",
        [],
        ["optimizer.grad_clip is '.NaN'", "finite number", "at least 0"],
    ),
    "an infinite number": (
        "model: {dropout: -.inf}",
        [],
        ["model.dropout is '-.inf'", "finite number", "at most 0.99"],
    ),
    "more than float32 holds": (
        "optimizer: {eps: 1e40}",
        [],
        ["optimizer.eps is 1e+40", "at most 3.40282e+38"],
    ),
    "less than float32 tells from zero": (
        "model: {norm_eps: 1e-50}",
        [],
        ["model.norm_eps is 1e-50", "0 in float32"],
    ),
    "a switch for a text of a list": (
        "data: {mixture: [no, yes]}",
        [],
        ["data.mixture[0] is no", "in quotes"],
    ),
    "more steps than int32 counts": (
        "train: {steps: 2_147_483_648}",
        [],
        ["train.steps is 2147483648", "at most 2147483647"],
    ),
    "a seed of more than 32 bits": (
        "run: {seed: 4294967296}",
        [],
        ["run.seed is 4294967296", "at most 4294967295"],
    ),
    "more fake devices than JAX can start": (
        "run: {fake_devices: 1_000_000}",
        [],
        ["run.fake_devices is 1000000", "at most 1024"],
    ),
    "a mesh of more devices than can be faked": (
        GOOD,
        [
            "mesh.data=100000",
            "train.global_batch_size=100000",
            "run.fake_devices=2",
            "data.source=synthetic",
        ],
        ["needs 100000 devices", "there are"],
    ),
    "a batch that takes long to divide by every number": (
        GOOD,
        [
            "train.global_batch_size=2147483646",
            "train.sequence_length=1",
            "mesh.data=4",
        ],
        ["mesh.data 4", "legal are 1, 2, 3, 6", "2147483646, or set"],
    ),
    "a pipeline whose table nobody has room for": (
        GOOD,
        [
            "model.layers=4000",
            "mesh.pipeline=4000",
            "parallel.microbatches=100000",
            "train.global_batch_size=100000",
        ],
        ["parallel.microbatches 100000", "mesh.pipeline 4000", "at most"],
    ),
    "a batch of more tokens than can be counted": (
        GOOD,
        ["train.global_batch_size=1000000", "train.sequence_length=1000000"],
        ["train.global_batch_size 1000000", "sequence_length 1000000", "tokens"],
    ),
    "an override of nothing at all": (GOOD, ["=3"], ["--set =3", "section.key=value"]),
    "an override too deep": (
        GOOD,
        ["model.layers.x=1"],
        ["model.layers is a key and has none of its own"],
    ),
    "a mistyped key of an inner section": (
        "parallel:\n  reduce:\n    blok: 3",
        [],
        [
            "line 3",
            "no key parallel.reduce.blok",
            "did you mean parallel.reduce.block?",
        ],
    ),
    "a value for an inner section": (
        "parallel: {reduce: 3}",
        [],
        ["line 1: section 'parallel.reduce' must be a mapping"],
    ),
    "a key of an inner section out of bounds": (
        "parallel: {reduce: {block: 3}}",
        [],
        ["line 1: parallel.reduce.block is 3", "at least 16"],
    ),
    "an override of an inner section": (
        GOOD,
        ["parallel.sync=3"],
        ["parallel.sync is a section", "its keys, every, outer_learning_rate"],
    ),
    "an override of a mistyped inner section": (
        GOOD,
        ["parallel.snc.every=3"],
        ["no key parallel.snc", "did you mean parallel.sync?"],
    ),
    "an override of a mistyped key of an inner section": (
        GOOD,
        ["parallel.sync.evry=3"],
        ["no key parallel.sync.evry", "did you mean parallel.sync.every?"],
    ),
    "an override with an empty word": (
        GOOD,
        ["parallel..every=3"],
        ["section.key=value"],
    ),
    "islands that do not divide data": (
        GOOD,
        ["mesh.data=4", "mesh.islands=3"],
        ["mesh.islands 3", "mesh.data 4", "legal are 1, 2, 4"],
    ),
    "more islands than data": (
        GOOD,
        ["mesh.data=2", "mesh.islands=4"],
        ["mesh.islands 4", "mesh.data 2", "legal are 1, 2"],
    ),
    "no islands": ("mesh: {islands: 0}", [], ["mesh.islands is 0", "at least 1"]),
    "islands that meet but are none": (
        GOOD,
        ["parallel.sync.every=5"],
        ["parallel.sync.every is 5", "mesh.islands is 1", "at least 2"],
    ),
    "a start of islands that never step by themselves": (
        GOOD,
        ["parallel.sync.start=5"],
        ["parallel.sync.start is 5", "parallel.sync.every is 0"],
    ),
    "a delay as long as the interval": (
        GOOD,
        [
            "mesh.data=2",
            "mesh.islands=2",
            "parallel.sync.every=5",
            "parallel.sync.delay=5",
        ],
        ["parallel.sync.delay 5", "at most 4"],
    ),
    "more fragments than layers": (
        GOOD,
        [
            "mesh.data=2",
            "mesh.islands=2",
            "parallel.sync.every=50",
            "parallel.sync.fragments=40",
        ],
        ["parallel.sync.fragments 40", "model.layers", "at most"],
    ),
    "more fragments than steps": (
        GOOD,
        [
            "mesh.data=2",
            "mesh.islands=2",
            "parallel.sync.every=2",
            "parallel.sync.fragments=3",
        ],
        ["parallel.sync.fragments 3", "at most 2"],
    ),
    "feedback of islands that step by themselves": (
        GOOD,
        [
            "mesh.data=2",
            "mesh.islands=2",
            "parallel.sync.every=2",
            "parallel.reduce.compression=int4",
            "parallel.reduce.feedback=true",
        ],
        [
            "parallel.reduce.compression int4",
            "parallel.sync.every",
            "parallel.reduce.feedback: false",
        ],
    ),
    "half an island": (
        "mesh: {islands: 0.5}",
        [],
        ["mesh.islands is '0.5'", "whole number"],
    ),
    "an order of a wrong word": (
        GOOD,
        ["mesh.order=[island, pipline, data, tensor]"],
        ["mesh.order has 'pipline'", "did you mean pipeline?"],
    ),
    "an order that lacks an axis": (
        GOOD,
        ["mesh.order=[data, tensor]"],
        [
            "mesh.order is [data, tensor]",
            "island, pipeline, data, tensor in any order, each once",
        ],
    ),
    "an order with an axis twice": (
        GOOD,
        ["mesh.order=[island, data, data, tensor]"],
        ["mesh.order is [island, data, data, tensor]", "each once"],
    ),
    "an order of nothing": (GOOD, ["mesh.order=[]"], ["mesh.order is []", "each once"]),
    "an order that is one word": (
        GOOD,
        ["mesh.order=data"],
        ["mesh.order", "must be a list"],
    ),
    "an override too deep of no section": (
        GOOD,
        ["a.b.c.d=1"],
        ["no section a", "legal are run"],
    ),
    "an override with a comment": (
        GOOD,
        ["train.steps=#"],
        ["train.steps is '#'", "whole number"],
    ),
    "an override with a list too deep": (
        GOOD,
        ["parallel.layer_split=" + "[" * 3000],
        ["layer_split", "must be a list"],
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", BAD)
def test_bad_input_is_refused_in_one_sentence(wrong, tmp_path, capsys, monkeypatch):
    text, overrides, says = BAD[wrong]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )
    arguments = [part for override in overrides for part in ("--set", override)]
    assert main(["--config", "run.yaml", *arguments]) == USAGE
    assert_sentence(capsys.readouterr().err, says)


def assert_sentence(stderr: str, says: list[str]) -> None:
    assert (
        stderr.startswith("meshtrain: ")
        and stderr.count("\n") == 1
        and stderr.rstrip()[-1] in ".?"
    ), stderr
    assert "Traceback" not in stderr and "Error" not in stderr
    for part in says:
        assert part in stderr, f"{part!r} is not in: {stderr}"


def test_missing_config_names_the_nearest_file(tmp_path, capsys):
    (tmp_path / "quickstart.yaml").write_text(GOOD)
    assert main(["--config", str(tmp_path / "quickstrat.yaml")]) == USAGE
    assert_sentence(
        capsys.readouterr().err,
        ["there is no config file", "did you mean", "quickstart.yaml?"],
    )


def make_loop(path):
    path.symlink_to(path)


# what --config names: (what makes it, what the sentence must say)
NO_FILES = {
    "a directory": (Path.mkdir, ["is a directory", "--config takes a YAML file"]),
    "a pipe that nobody writes to": (
        os.mkfifo,
        ["is a pipe", "--config takes a YAML file"],
    ),
    "a device": (
        lambda path: path.symlink_to("/dev/null"),
        ["is a device", "--config takes a YAML file"],
    ),
    "a link to itself": (make_loop, ["cannot be read", "symbolic links"]),
    "a link to nothing": (
        lambda path: path.symlink_to("gone"),
        ["run.yaml is a link to", "gone, which is not there"],
    ),
    "below a file": (
        lambda path: path.parent.joinpath("run").touch(),
        ["no config file"],
    ),
}


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_plain_file_is_refused_without_waiting(what, tmp_path, capsys):
    make, says = NO_FILES[what]
    make(tmp_path / "run.yaml")
    assert main(["--config", str(tmp_path / "run.yaml")]) == USAGE
    said = capsys.readouterr().err
    assert_sentence(said, says)
    assert "did you mean" not in said


def test_what_a_shells_command_writes_to_a_pipe_is_a_config(capsys):
    reading, writing = os.pipe()
    os.write(writing, b"model: {layers: 3}\n")
    os.close(writing)
    assert main(["--config", f"/dev/fd/{reading}", "--print-config"]) == 0
    os.close(reading)
    assert "layers: 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [
        "a\0b.yaml",
        "a\ud800b.yaml",
        os.fsdecode(b"\xff\xfe.yaml"),
        "a" * 300 + ".yaml",
        "a" * 5000 + ".yaml",
        "",
    ],
    ids=["NUL", "surrogate", "bytes", "long name", "long", "empty"],
)
def test_a_path_that_no_file_can_have_is_refused(path):
    with pytest.raises(ConfigError) as refused:
        load(path)
    sentence = str(refused.value)
    assert len(sentence) < 500 and sentence.endswith(".") and sentence.isprintable(), (
        sentence
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_config_is_refused(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "run.yaml").chmod(0)
    assert main(["--config", str(tmp_path / "run.yaml")]) == USAGE
    assert_sentence(capsys.readouterr().err, ["cannot be read"])


ODD = [
    "",
    "~",
    "off",
    "0",
    "-1",
    "010",
    "0x10",
    "1e3",
    "1e-50",
    ".nan",
    "-.inf",
    "9" * 5000,
    "a" * 5000,
    "[]",
    "[~]",
    "[[1]]",
    "{a: 1}",
    "'",
    '"\\0"',
    '"\\uD800"',
    "#",
    "*a",
    "&a",
    "!!int 3",
    "- a",
    "|",
    "%",
    "\t",
    "\ufeff",
    "2147483647",
    "4294967296",
]


@pytest.mark.parametrize(
    "every",
    [20, pytest.param(1, marks=pytest.mark.thorough)],
    ids=["a twentieth", "all"],
)
@pytest.mark.parametrize(
    "section", [field.name for field in dataclasses.fields(Config)]
)
def test_an_odd_value_of_any_key_is_taken_whole_or_refused_in_a_sentence(
    section, every, tmp_path
):
    """Of each key every value, or by turns every twentieth."""
    (tmp_path / "run.yaml").write_text(GOOD)
    for i, key in enumerate(keys(type(getattr(Config(), section)))):
        for odd in ODD[i % every :: every]:
            try:
                config = load(tmp_path / "run.yaml", [f"{section}.{key}={odd}"])
            except ConfigError as refused:
                sentence = str(refused)
                assert (
                    sentence.isprintable()
                    and len(sentence) < 1000
                    and sentence[-1] in ".?"
                ), (
                    key,
                    odd,
                    sentence,
                )
                continue
            notes(config)
            (tmp_path / "again.yaml").write_text(to_yaml(config))
            assert load(tmp_path / "again.yaml") == config, (key, odd)

"""Configs: YAML that is none, values that are none, files that are none, numbers beyond bounds, combinations that
cannot run.
"""

import os
from collections.abc import Callable

from experiments.faults.harness import (
    Place,
    Silent,
    Unclear,
    done,
    fault,
    kind,
    last_line,
    refused,
    told_or_done,
)

ROOM = "config"


def bad_file(name: str, text: str | bytes, *words: str, point: str = "") -> None:
    """Refused by --print-config, which reads and checks as training does."""

    @fault(ROOM, name, point)
    def _(p: Place) -> None:
        p.config(text=text)
        refused(p.command("train", "--config", "config.yaml", "--print-config"), *words)


def bad_path(
    name: str, arrange: Callable[[Place], object], path: str, *words: str, point: str = ""
) -> None:
    @fault(ROOM, f"--config {name}", point)
    def _(p: Place) -> None:
        arrange(p)
        ended = p.command("train", "--config", path, "--print-config")
        refused(ended, *words)
        if "did you mean" in ended.err and path in ended.err.split("did you mean")[1]:
            raise Unclear(f"offered as its own correction: {last_line(ended.err)}")


kind(
    "config-path",
    "test_config.py::test_what_is_no_plain_file_is_refused_without_waiting",
    "test_config.py::test_a_path_that_no_file_can_have_is_refused",
    "test_config.py::test_missing_config_names_the_nearest_file",
)
bad_path("that is not there", lambda p: None, "gone.yaml", "gone.yaml")
bad_path("with a slip of the pen", lambda p: p.config(), "confg.yaml", "did you mean config.yaml")
bad_path(
    "that is a dangling link",
    lambda p: (p.dir / "link.yaml").symlink_to("gone"),
    "link.yaml",
    "link.yaml",
    point="13",
)
bad_path(
    "that is a link to itself",
    lambda p: (p.dir / "link.yaml").symlink_to("link.yaml"),
    "link.yaml",
    "link.yaml",
    point="13",
)
bad_path("that is a directory", lambda p: (p.dir / "d.yaml").mkdir(), "d.yaml", "directory")
bad_path("that is empty: --config ''", lambda p: None, "", "--config|argument", point="13")
bad_path("that is /dev/null", lambda p: None, "/dev/null", "/dev/null", point="13")
bad_path("that is /dev/zero", lambda p: None, "/dev/zero", "/dev/zero")
bad_path("under a file", lambda p: p.config(), "config.yaml/x", "config.yaml/x")
bad_path("with a name of 300 characters", lambda p: None, "x" * 300)
bad_path("with a path of 5,000 characters", lambda p: None, "x/" * 2500, point="13")
bad_path("with a NUL in it", lambda p: None, "a\0b.yaml", "NUL|null|--config", point="11")
bad_path("with half of a surrogate pair in it", lambda p: None, "a\ud800.yaml", point="11")
bad_path("with bytes that are not UTF-8", lambda p: None, os.fsdecode(b"\xff\xfe.yaml"), "yaml")

kind("config-yaml", "test_config.py::test_bad_input_is_refused_in_one_sentence")
bad_file("an empty file", "", "empty")
bad_file("white space alone", "\n\n  \n", "empty")
bad_file("a comment alone", "# nothing\n", "empty")
bad_file("null", "null\n", "mapping|empty")
bad_file("a list", "- run\n- model\n", "mapping")
bad_file("a number", "3\n", "mapping")
bad_file("two documents", "run: {seed: 1}\n---\nrun: {seed: 2}\n", "YAML|document")
bad_file("bytes that are not UTF-8", b"run: {directory: \xff}\n", "UTF-8|text")
bad_file("UTF-16", "run: {seed: 1}\n".encode("utf-16"), "UTF-8|text")
bad_file("a NUL", "run: {directory: a\0b}\n", "YAML|NUL|config.yaml", point="11")
bad_file("a NUL by escape", 'run: {directory: "a\\0b"}\n', "run.directory", point="11")
bad_file(
    "a surrogate by escape", 'run: {directory: "a\\ud800"}\n', "run.directory|YAML", point="11"
)
bad_file("a tab", "run:\n\tseed: 1\n", "line 2")
bad_file("a bracket left open", "run: {seed: 1\n", "YAML")
bad_file(
    "nested 3,000 deep in lists", "run: " + "[" * 3000 + "]" * 3000, "deep|nested|YAML", point="11"
)
bad_file(
    "nested 3,000 deep in mappings",
    "a: " + "{a: " * 3000 + "1" + "}" * 3000,
    "deep|nested|YAML|section",
    point="11",
)
bad_file("nested 100,000 deep", "[" * 100_000, "deep|nested|YAML", point="11")
bad_file("a list as key", "? [run, model]\n: 1\n", "key|section", point="13")
bad_file("a mapping as key", "? {run: model}\n: 1\n", "key|section", point="13")
bad_file("a list as key of a section", "run:\n  ? [seed]\n  : 1\n", "key", point="13")
bad_file("an alias to nothing", "run: *nothing\n", "YAML")
bad_file("an anchor that holds itself", "run: &a\n  seed: *a\n", "seed")
bad_file("a mapping that holds itself", "&a run: &b {directory: *b}\n", "directory")
bad_file("a merge key", "base: &b {seed: 1}\nrun: {<<: *b}\n", "base|<<")
bad_file("a Python object", "run: !!python/object/apply:os.system [ls]\n", "mapping|section|tag")
bad_file("a key twice", "run: {seed: 1, seed: 2}\n", "twice")
bad_file("a section twice", "run: {seed: 1}\nrun: {seed: 2}\n", "twice")
bad_file("a key in another case", "run: {Seed: 1}\n", "Seed", "did you mean seed")
bad_file("a section that there is not", "modle: {layers: 1}\n", "did you mean model")
bad_file("a section that is a list", "run: [1]\n", "mapping")
bad_file("a key that is no text", "run: {3: 1}\n", "3")
bad_file("a key of 1,000 characters", f"run: {{{'x' * 1000}: 1}}\n", "run.", point="13")
bad_file(
    "a billion laughs",
    "a: &a [x, x]\nb: &b [*a, *a, *a]\nc: &c [*b, *b, *b]\nd: [*c, *c, *c]\n",
    "section",
)


def bad(value: str, *words: str, point: str = "", name: str = "") -> None:
    """--set VALUE is refused, and so is the same in the file."""

    @fault(ROOM, f"--set {name or value}", point)
    def _(p: Place) -> None:
        p.config()
        refused(
            p.command("train", "--config", "config.yaml", "--print-config", "--set", value), *words
        )


kind(
    "config-value",
    "test_config.py::test_bad_input_is_refused_in_one_sentence",
    "test_config.py::test_an_odd_value_of_any_key_is_taken_whole_or_refused_in_a_sentence",
    "test_config.py::test_what_a_shells_command_writes_to_a_pipe_is_a_config",
    "checkpoint/test_restoring.py::test_what_cannot_be_asked_for_is_refused",
    "test_cli.py::test_wrong_usage_is_one_sentence_and_exit_code_2",
)
bad("", "--set|argument")
bad("=", "--set")
bad("mesh", "--set")
bad("mesh.data", "--set")
bad("mesh.data.more=1", "mesh.data")
bad(".data=1", "--set")
bad("mesh.=1", "--set")
bad("mesh.dta=1", "did you mean data")
bad("mesh.data=", "mesh.data")
bad("mesh.data=two", "mesh.data", "whole number")
bad("mesh.data=1.5", "mesh.data", "whole number")
bad("mesh.data=1e3", "mesh.data", "whole number")
bad("mesh.data=0", "mesh.data", "at least 1")
bad("mesh.data=-1", "mesh.data")
bad("mesh.data=null", "mesh.data")
bad("mesh.data=[1]", "mesh.data", "list")
bad("mesh.data={a: 1}", "mesh.data", "mapping")
bad("mesh.data=true", "mesh.data")
bad("train.steps=010", "train.steps", "010", point="13")
bad("mesh.data=0x10", "mesh.data")
bad("mesh.data=" + "9" * 5000, "mesh.data", point="13", name="mesh.data=9… (5,000 digits)")
bad("mesh.data=" + "9" * 19, "mesh.data|devices|divide", name="mesh.data=9… (19 digits)")
bad("optimizer.learning_rate=.nan", "learning_rate", point="13")
bad("optimizer.learning_rate=.inf", "learning_rate", point="13")
bad("optimizer.learning_rate=-.inf", "learning_rate", point="13")
bad("optimizer.learning_rate=nan", "learning_rate", "finite")
bad("optimizer.learning_rate=1e999", "learning_rate")
bad("optimizer.learning_rate=0", "learning_rate", "above")
bad(
    "optimizer.learning_rate=" + "1" * 5000,
    "learning_rate",
    point="13",
    name="optimizer.learning_rate=1… (5,000 digits)",
)
bad(
    "optimizer.name=" + "x" * 5000,
    "optimizer.name",
    point="13",
    name="optimizer.name=x… (5,000 characters)",
)
bad("optimizer.name=adam", "did you mean adamw")
bad("run.seed=" + "9" * 30, "run.seed", point="11", name="run.seed=9… (30 digits)")
bad("run.seed=18446744073709551616", "run.seed", point="11")
bad("run.seed=-1", "run.seed")
bad("run.directory=", "run.directory")
bad("train.steps=2147483648", "train.steps", point="13")
bad("train.steps=9223372036854775808", "train.steps", point="13")
bad("mesh.data=" + "9" * 400, "mesh.data", name="mesh.data=9… (400 digits)")
bad("precision.loss_scale=1e40", "loss_scale", point="5")
bad("precision.loss_scale=inf", "loss_scale")
bad("precision.compute=float8", "precision.compute")
bad("model.dropout=1", "model.dropout")
bad("model.heads=3", "heads")
bad("model.family=lama", "did you mean llama")
bad("parallel.layer_split=1", "layer_split", "list")
bad("parallel.schedule=1f1c", "did you mean 1f1b")
bad("parallel.schedule=gone.csv", "gone.csv")
bad("parallel.remat_keep=[qkv]", "remat")
bad("checkpoint.keep=0", "checkpoint.keep")
bad("data.mixture=[a]", "data.mixture|data.source")
bad("eval.batches=0", "eval.batches")


@fault(ROOM, "a split of layers that does not fit")
def layer_split(p: Place) -> None:
    refused(p.train("parallel.layer_split=[1, 2, 3]", "mesh.pipeline=2"), "layer_split")


@fault(ROOM, "a batch that nothing divides, of 19 digits")
def divisors(p: Place) -> None:
    p.config()
    settings = ("--set", "train.global_batch_size=1000000000000000003", "--set", "mesh.data=2")
    refused(
        p.command("train", "--config", "config.yaml", "--print-config", *settings),
        "global_batch_size",
    )


@fault(ROOM, "checkpoint.allow names what is no key")
def allow(p: Place) -> None:
    refused(p.train("checkpoint.allow=[data.sorce]"), "did you mean data.source")


@fault(ROOM, "a config through a pipe: --config <(cat FILE)")
def through_a_pipe(p: Place) -> None:
    p.config()
    done(
        p.python("-m", "meshtrain.train", "--print-config", "--config", shell="<(cat config.yaml)"),
        "d_model: 16",
    )


@fault(ROOM, "010 in a file: an octal number to YAML, ten to a reader", "13")
def octal(p: Place) -> None:
    p.config(text="train: {steps: 010}\n")
    refused(p.command("train", "--config", "config.yaml", "--print-config"), "010")


@fault(ROOM, "--config twice, --set without a value, a word too many")
def usage(p: Place) -> None:
    p.config()
    for arguments in (
        ["--config", "config.yaml", "--set"],
        ["--config", "config.yaml", "word"],
        [],
        ["--confg", "config.yaml"],
    ):
        refused(p.command("train", *arguments))


def legal(name: str, *settings: str, quiet: bool = False, point: str = "") -> None:
    """It can run, so it must."""

    @fault(ROOM, f"legal: {name}", point)
    def _(p: Place) -> None:
        done(p.train(*settings), quiet=quiet)
        if p.last_step() != 8:
            raise Silent(f"{p.last_step()} steps")


kind("config-legal")
legal("v_1f1b with pipeline 1", "parallel.schedule=v_1f1b", "model.layers=1", point="13")
legal("the largest seed of 32 bits", "run.seed=4294967295", point="11")
legal("a value with Windows line ends and a byte order mark", "run.seed=1\r")
legal("warm-up longer than the run", "optimizer.warmup_steps=1000")
legal("the smallest learning rate", "optimizer.learning_rate=1e-37")
legal("more fake devices than are used", "run.fake_devices=3")
legal("log and checkpoints beyond the end", "log.every=100", "checkpoint.every=100")


@fault(ROOM, "a config file with a byte order mark and Windows line ends")
def windows(p: Place) -> None:
    p.config(text=b"\xef\xbb\xbfrun: {seed: 3}\r\ntrain: {steps: 4}\r\n")
    ended = p.command("train", "--config", "config.yaml", "--print-config")
    done(ended, "seed: 3", "steps: 4")


@fault(ROOM, "the learning rate ends at its final ratio and begins above zero", "13")
def rungs(p: Place) -> None:
    done(
        p.train(
            "optimizer.warmup_steps=4", "optimizer.learning_rate=0.01", "optimizer.final_ratio=0.1"
        )
    )
    rates = [row["learning_rate"] for row in p.rows()]
    if not rates[0] > 0 or abs(rates[-1] - 0.001) > 1e-6 or max(rates) > 0.01 * (1 + 1e-6):
        raise Silent(f"learning rates {rates}")


@fault(ROOM, "the note of idle stages counts the chunks of an interleaved schedule", "13")
def idle(p: Place) -> None:
    def sentence(*settings: str) -> str:
        ended = p.train(
            "mesh.pipeline=4",
            "model.layers=8",
            "parallel.microbatches=2",
            "train.steps=1",
            "checkpoint.resume=never",
            *settings,
        )
        done(ended)
        return next((line for line in ended.out.splitlines() if "idles" in line), "")

    plain = sentence("parallel.schedule=1f1b")
    chunked = sentence("parallel.schedule=interleaved", "parallel.virtual_stages=2")
    if "60%" in plain and "60%" in chunked:
        raise Silent(f"the same with two chunks: {chunked}")


@fault(ROOM, "the note of idle stages and --print-config agree on a config read back")
def round_trip(p: Place) -> None:
    p.config()
    first = p.command("train", "--config", "config.yaml", "--print-config")
    p.file("again.yaml", first.out)
    second = p.command("train", "--config", "again.yaml", "--print-config")
    done(second)
    if first.out != second.out:
        raise Silent("the config that is printed is not the one that is read")


@fault(ROOM, "a directory whose name YAML reads as a number, a date, a truth, a null")
def names(p: Place) -> None:
    for name in ("1e3", "2024-01-01", "yes", "0x10", "1_000"):
        p.config(text=f"run: {{directory: {name}}}\n")
        ended = p.command("train", "--config", "config.yaml", "--print-config")
        if told_or_done(ended, "run.directory") and name not in ended.out.splitlines()[1]:
            raise Silent(f"{name} became {ended.out.splitlines()[1]}")

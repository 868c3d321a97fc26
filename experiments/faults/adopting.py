"""python -m meshtrain.adopt: Hugging Face directories whose weights, config.json or index are damaged or wrong."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.faults.harness import (
    DAMAGE,
    REPOSITORY,
    Place,
    Silent,
    done,
    fault,
    kind,
    refused,
    refuses,
)

GOLDEN = REPOSITORY / "tests/adopt/golden"  # small models that transformers wrote
Q = "model.layers.1.self_attn.q_proj.weight"
Tensors = dict[str, np.ndarray]
Act = Callable[[Path], object]


def theirs(
    p: Place,
    model: str = "llama3",
    change: Callable[[Tensors], object] = lambda tensors: None,
) -> Path:
    """A directory of theirs as `hf`, its weights in one file, which `change` may alter."""
    from safetensors.numpy import load_file, save_file

    place = p.dir / "hf"
    place.mkdir()
    for path in (GOLDEN / model).glob("*.json"):
        if "index" not in path.name:
            shutil.copy(path, place)
    tensors: Tensors = {}
    for path in sorted((GOLDEN / model).glob("*.safetensors")):
        tensors |= load_file(path)
    change(tensors)
    plain = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(plain, place / "model.safetensors")
    return place


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A JSON file with some of its values changed; what `change` returns as a text is written as it is."""
    values = json.loads(path.read_text())
    changed = change(values)
    path.write_text(changed if isinstance(changed, str) else json.dumps(values))


def is_refused(
    name: str,
    arrange: Callable[[Place], object],
    *words: str,
    commands: tuple[str, ...] = ("inspect hf", "import hf out"),
) -> None:
    """Each of the commands refuses it, and leaves nothing behind."""

    @fault(name)
    def _(p: Place) -> None:
        arrange(p)
        for command in commands:
            try:
                refused(p.command("adopt", *command.split()), *words)
            except Silent as verdict:
                raise Silent(f"{command}: {verdict}") from None
            if (p.dir / "out").exists():
                raise Silent(f"{command} leaves half a checkpoint")


# --- weights
kind("weights-file")


def header(size: int | None = None, text: bytes | None = None) -> Act:
    """Another length of the header, or another text."""

    def act(path: Path) -> None:
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        told = content[8 : 8 + length] if text is None else text
        told_size = struct.pack("<Q", len(told) if size is None else size)
        path.write_bytes(told_size + told + content[8 + length :])

    return act


def replaced(old: bytes, new: bytes) -> Act:
    def act(path: Path) -> None:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return act


def holds(content: bytes) -> Act:
    return lambda path: path.write_bytes(content)


FILES: dict[str, Act] = {
    **{
        way: act
        for way, act in DAMAGE.items()
        if way not in ("with a bit flipped", "doubled")
    },
    "with a header of no bytes": header(0),
    "with a header longer than the file": header(2**40),
    "with a header of 2^63 bytes": header(2**63),
    "with a header that is no JSON": header(text=b"{" * 64),
    "with a header that is a list": header(text=b"[]"),
    "with a header nested 100,000 deep": header(text=b"[" * 100_000),
    "without a tensor": header(text=b"{}"),
    "with a dtype that there is not": replaced(b'"F32"', b'"F99"'),
    "with offsets beyond its end": lambda path: os.truncate(
        path, path.stat().st_size - 64
    ),
    "that is a pickle under this name": holds(b"\x80\x04\x95" + bytes(200)),
    "that is a page of an error": holds(b"<html>404</html>"),
    "that is a pointer of Git LFS": holds(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
}
for name, act in FILES.items():
    is_refused(
        f"model.safetensors {name}",
        lambda p, act=act: act(theirs(p) / "model.safetensors"),
    )

kind("weights-wrong")


def weights(
    name: str, model: str, word: str, change: Callable[[Tensors], object]
) -> None:
    is_refused(f"weights of a {model} {name}", lambda p: theirs(p, model, change), word)


def names(tensors: Tensors, part: str) -> list[str]:
    return [name for name in tensors if part in name]


weights("with one missing", "gpt2", "c_fc", lambda t: t.pop(names(t, "c_fc.weight")[0]))
weights(
    "with NaN", "gpt2", "NaN|finite", lambda t: t[names(t, "c_fc.bias")[0]].fill(np.nan)
)
weights(
    "with one of another shape",
    "vit",
    "classifier",
    lambda t: t.update({n: t[n][:3] for n in names(t, "classifier.weight")}),
)
weights(
    "under other names",
    "llama3",
    "",
    lambda t: [t.update({f"x.{n}": t.pop(n)}) for n in list(t)],
)

kind("weights-index")


def index(name: str, change: Callable[[dict[str, Any]], object], *words: str) -> None:
    def arrange(p: Place) -> None:
        shutil.copytree(GOLDEN / "llama3", p.dir / "hf")
        rewritten(p.dir / "hf/model.safetensors.index.json", change)

    is_refused(f"model.safetensors.index.json {name}", arrange, *words)


def points(to: Any) -> Callable[[dict[str, Any]], object]:
    return lambda v: v["weight_map"].update({Q: to})


index("that is no JSON", lambda v: "{")
index("that is a list", lambda v: "[]")
index("that is nested 100,000 deep", lambda v: "[" * 100_000)
index("without its map", lambda v: v.pop("weight_map") and None, "weight_map")
index("whose map is a list", lambda v: v.update(weight_map=[]), "weight_map")
index("whose map is empty", lambda v: v.update(weight_map={}))
index("with a file that is a number", points(3), "weight_map")
index("with a NUL in a file's name", points("a\0b.safetensors"))
index("with a file that is a directory", points("."))

# --- config.json
kind("theirs-config")
for name, content in (
    ("no JSON", "{"),
    ("a list", "[]"),
    ("null", "null"),
    ("nested 100,000 deep", '{"a":' * 100_000),
    ("empty", ""),
    ("a number of 5,000 digits", '{"hidden_size": ' + "9" * 5000 + "}"),
):
    is_refused(
        f"config.json that is {name}",
        lambda p, content=content: (theirs(p) / "config.json").write_text(content),
        commands=("inspect hf",),
    )

# --- what lies beside the weights
kind("adapters")


def adapters(name: str, act: Act, *words: str) -> None:
    def arrange(p: Place) -> None:
        theirs(p, "qwen3")
        shutil.copytree(GOLDEN / "qwen3_lora", p.dir / "lora")
        act(p.dir / "lora")

    is_refused(
        f"adapters {name}", arrange, *words, commands=("import hf out --adapter lora",)
    )


def adapter_config(act: Act) -> Act:
    return lambda path: act(path / "adapter_config.json")


adapters("that are not there", shutil.rmtree, "lora")
adapters("without adapter_config.json", adapter_config(Path.unlink), "adapter_config")
adapters("whose config is a list", adapter_config(holds(b"[]")))
adapters(
    "with a module that is not here",
    lambda path: replaced(b"q_proj", b"z_proj")(path / "adapter_model.safetensors"),
)

# --- out again
kind("adopted-out")


def out(name: str, command: str, word: str) -> None:
    def arrange(p: Place) -> None:
        p.file("taken/mine.txt", "x")

    refuses(name, ("adopt", *command.split()), word, base="synthetic", arrange=arrange)


out("export into a directory that is there", "export run taken", "taken")
out("export of nothing", "export nowhere out", "nowhere")
out("export of a step that is not there", "export run out --step 5", "5")
out("export of a step that is a word", "export run out --step last", "--step")
out("export in a dtype that there is not", "export run out --dtype int8", "dtype")
out("export of adapters that there are not", "export run out --adapter", "adapters")
out("merge without adapters", "merge run out", "adapters")
out(
    "export with a tokenizer that is not there",
    "export run out --tokenizer gone",
    "gone",
)
out("export under a file", "export run config.yaml/out", "config.yaml")


@fault("bfloat16 comes in and goes out again: the same bytes")
def same_bytes(p: Place) -> None:
    import ml_dtypes
    from safetensors.numpy import load_file

    def halve(tensors: Tensors) -> None:
        tensors.update({n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()})

    place = theirs(p, "llama3", halve)
    rewritten(
        place / "config.json",
        lambda v: v.update(dtype="bfloat16", torch_dtype="bfloat16"),
    )
    done(p.command("adopt", "import", "hf", "out"))
    done(p.command("adopt", "export", "out", "back"))
    before, after = (
        load_file(path / "model.safetensors") for path in (place, p.dir / "back")
    )
    missing = np.zeros(0)
    wrong = [
        name
        for name, x in before.items()
        if (y := after.get(name, missing)).dtype != x.dtype
        or y.tobytes() != x.tobytes()
    ]
    if wrong:
        raise Silent(
            f"{len(wrong)} of {len(before)} tensors are other bytes, such as {wrong[0]}"
        )

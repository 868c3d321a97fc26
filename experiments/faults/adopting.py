"""python -m meshtrain.adopt: Hugging Face directories whose weights, config.json, index or tokenizer are damaged, wrong
or another's.
"""

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
    Ended,
    Place,
    Silent,
    done,
    fault,
    kind,
    refused,
    told_or_done,
)

ROOM = "adopting"
GOLDEN = REPOSITORY / "tests/adopt/golden"  # small models that transformers wrote
Tensors = dict[str, np.ndarray]


def theirs(
    p: Place, model: str = "llama3", change: Callable[[Tensors], object] = lambda tensors: None
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
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()}, place / "model.safetensors"
    )
    return place


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A JSON file with some of its values changed; what `change` returns as a text is written as it is."""
    values = json.loads(path.read_text())
    changed = change(values)
    path.write_text(changed if isinstance(changed, str) else json.dumps(values))


def adopt(p: Place, *arguments: str) -> Ended:
    return p.command("adopt.__main__", *arguments)


def refused_by(p: Place, *commands: tuple[str, ...], words: tuple[str, ...] = ()) -> None:
    """Each of the commands refuses it, and leaves nothing behind."""
    for arguments in commands:
        try:
            refused(adopt(p, *arguments), *words)
        except Silent as verdict:
            raise Silent(f"{arguments[0]}: {verdict}") from None
        if (p.dir / "out").exists():
            raise Silent(f"{arguments[0]} leaves half a checkpoint")


INSPECT, IMPORT = ("inspect", "hf"), ("import", "hf", "out")

# --- weights

kind("weights-file")
WEIGHTS = "hf/model.safetensors"


def file(name: str, act: Callable[[Path], object]) -> None:
    @fault(ROOM, f"model.safetensors {name}")
    def _(p: Place) -> None:
        theirs(p)
        act(p.dir / WEIGHTS)
        refused_by(p, INSPECT, IMPORT)


def header(size: int | None = None, text: bytes | None = None) -> Callable[[Path], None]:
    """Another length of the header, or another text."""

    def act(path: Path) -> None:
        content = path.read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        told = content[8 : 8 + length] if text is None else text
        path.write_bytes(
            struct.pack("<Q", len(told) if size is None else size) + told + content[8 + length :]
        )

    return act


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return act


for way in (
    "truncated",
    "emptied",
    "removed",
    "become a directory",
    "become a dangling link",
    "become a link to itself",
    "become a FIFO",
    "become zeros",
):
    file(way, DAMAGE[way])
file("with a header of no bytes", header(0))
file("with a header longer than the file", header(2**40))
file("with a header of 2^63 bytes", header(2**63))
file("with a header that is no JSON", header(text=b"{" * 64))
file("with a header that is a list", header(text=b"[]"))
file("with a header nested 100,000 deep", header(text=b"[" * 100_000))
file("without a tensor", header(text=b"{}"))
file("with a dtype that there is not", replaced(b'"F32"', b'"F99"'))
file("with offsets beyond its end", lambda path: os.truncate(path, path.stat().st_size - 64))
file(
    "that is a pickle under this name", lambda path: path.write_bytes(b"\x80\x04\x95" + bytes(200))
)
file("that is a page of an error", lambda path: path.write_text("<html>404</html>"))
file(
    "that is a pointer of Git LFS",
    lambda path: path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
)

kind(
    "weights-wrong",
    "hf/test_loading.py::test_a_tensor_too_many_or_of_another_shape_is_refused",
    "hf/test_loading.py::test_whole_numbers_are_no_weights",
    "hf/test_loading.py::test_weights_that_are_no_numbers_are_refused",
    "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
)


def weights(
    name: str, change: Callable[[Tensors], object], *words: str, model: str = "llama3"
) -> None:
    @fault(ROOM, f"weights {name}")
    def _(p: Place) -> None:
        theirs(p, model, change)
        refused_by(p, INSPECT, IMPORT, words=words)


Q = "model.layers.1.self_attn.q_proj.weight"


def with_number(value: float) -> Callable[[Tensors], object]:
    return lambda t: t[Q].__setitem__((3, 2), value)


weights("with one missing", lambda t: t.pop(Q), Q)
weights(
    "with one more than the config has",
    lambda t: t.update({"model.layers.7.mlp.up_proj.weight": np.zeros((24, 16), np.float32)}),
    "model.layers.7",
)
weights("with one of another shape", lambda t: t.update({Q: t[Q][:8]}), Q)
weights(
    "with one transposed",
    lambda t: t.update(
        {"model.layers.1.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"].T}
    ),
    "up_proj",
)
weights("with one of one dimension more", lambda t: t.update({Q: t[Q][None]}), Q)
weights("with one that is a number", lambda t: t.update({Q: np.float32(1.0).reshape(())}), Q)
weights("with one that is empty", lambda t: t.update({Q: t[Q][:0]}), Q)
weights("with one in int8", lambda t: t.update({Q: t[Q].astype(np.int8)}), Q, "I8|int8")
weights("with one in int32", lambda t: t.update({Q: t[Q].astype(np.int32)}), Q)
weights(
    "all in int8, as a quantized model has them",
    lambda t: t.update({n: x.astype(np.int8) for n, x in t.items()}),
)
weights("with a NaN", with_number(float("nan")), "NaN|finite")
weights("with an infinity", with_number(float("inf")), "inf|finite")
weights("all NaN", lambda t: [x.fill(float("nan")) for x in t.values()], "NaN|finite")
weights("under other names", lambda t: [t.update({f"x.{n}": t.pop(n)}) for n in list(t)])
weights(
    "with the embedding of another vocabulary",
    lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:40]}),
    "embed_tokens",
)
weights(
    "of two layers, where the config has three",
    lambda t: [t.pop(n) for n in list(t) if ".2." in n],
    "layers.2",
)
weights(
    "of a gpt2 with one missing",
    lambda t: t.pop(next(n for n in t if "c_fc.weight" in n)),
    "c_fc",
    model="gpt2",
)
weights(
    "of a gpt2 with a NaN",
    lambda t: next(x for n, x in t.items() if "c_fc.bias" in n).fill(float("nan")),
    "NaN|finite",
    model="gpt2",
)
weights(
    "of a vit with one of another shape",
    lambda t: t.update({n: x[:3] for n, x in t.items() if "classifier.weight" in n}),
    "classifier",
    model="vit",
)

kind("weights-index")


def index(name: str, change: Callable[[dict[str, Any]], object], *words: str) -> None:
    @fault(ROOM, f"model.safetensors.index.json {name}")
    def _(p: Place) -> None:
        shutil.copytree(GOLDEN / "llama3", p.dir / "hf")
        rewritten(p.dir / "hf/model.safetensors.index.json", change)
        refused_by(p, INSPECT, IMPORT, words=words)


def points(to: str) -> Callable[[dict[str, Any]], object]:
    return lambda v: v["weight_map"].update({Q: to})


index("that is no JSON", lambda v: "{")
index("that is a list", lambda v: "[]")
index("that is nested 100,000 deep", lambda v: "[" * 100_000)
index("without its map", lambda v: v.pop("weight_map") and None, "weight_map")
index("whose map is a list", lambda v: v.update(weight_map=[]), "weight_map")
index("whose map is empty", lambda v: v.update(weight_map={}))
index("with a file that is a number", points(3), "weight_map")  # type: ignore[arg-type]
index("with a file that is not there", points("gone.safetensors"), "gone.safetensors")
index("with a file outside", points("../../../etc/passwd"), "passwd")
index("with an absolute file", points("/etc/passwd"), "passwd")
index("with a file named by 5,000 characters", points("x" * 5000 + ".safetensors"))
index("with a NUL in a file's name", points("a\0b.safetensors"))
index("with a file that has not the tensor", points("model-00001-of-00004.safetensors"), Q)
index("with a file that is a directory", points("."))

# --- config.json

kind("theirs-config")


def config(
    name: str, change: Callable[[dict[str, Any]], object], *words: str, model: str = "llama3"
) -> None:
    @fault(ROOM, f"config.json {name}")
    def _(p: Place) -> None:
        theirs(p, model)
        rewritten(p.dir / "hf/config.json", change)
        refused_by(p, INSPECT, words=words)


def says(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda v: v.update(values)


config("that is no JSON", lambda v: "{")
config("that is a list", lambda v: "[]")
config("that is null", lambda v: "null")
config("that is nested 100,000 deep", lambda v: '{"a":' * 100_000)
config("that is empty", lambda v: "")
config("that has a number of 5,000 digits", lambda v: '{"hidden_size": ' + "9" * 5000 + "}")
kind(
    "theirs-config",
    "hf/test_loading.py::test_what_cannot_be_computed_is_refused_by_name",
    "hf/test_loading.py::test_the_window_is_that_of_transformers_or_refused_where_layers_differ",
    "hf/test_loading.py::test_a_tensor_too_many_or_of_another_shape_is_refused",
)
config("without a model_type", lambda v: v.pop("model_type") and None, "model_type")
config("with a model_type that is a list", says(model_type=["llama"]), "model_type")
for key in (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
):
    config(f"without {key}", lambda v, key=key: v.pop(key) and None, key)
    for shown, value in (
        ("zero", 0),
        ("below zero", -1),
        ("a text", "16"),
        ("a fraction", 16.5),
        ("true", True),
        ("a list", [16]),
    ):
        config(f"with {key} that is {shown}", says(**{key: value}), f"{key}|model.")
for key, value in (
    ("num_key_value_heads", 0),
    ("num_key_value_heads", "2"),
    ("num_key_value_heads", 3),
    ("head_dim", -4),
    ("head_dim", "4"),
    ("head_dim", 3),
    ("rms_norm_eps", "small"),
    ("rms_norm_eps", -1.0),
    ("hidden_act", "swosh"),
    ("hidden_act", 3),
    ("tie_word_embeddings", "yes"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("rope_parameters", []),
    ("rope_parameters", {"rope_theta": "big", "rope_type": "default"}),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "longrope"}),
    ("rope_parameters", {"rope_theta": 1e4, "rope_type": "llama3"}),
    ("quantization_config", {"quant_method": "gptq"}),
    ("vocab_size", 40),
    ("num_hidden_layers", 4),
    ("hidden_size", 32),
    ("intermediate_size", 48),
):
    if not (key == "num_key_value_heads" and value == 0):  # which stands for none said
        config(f"with {key} {json.dumps(value)}", says(**{key: value}))
for stranger in (
    "smollm3",
    "gpt_oss",
    "llama4_text",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "phi3",
    "bert",
):

    @fault(ROOM, f"config.json of model_type {stranger}: no other family is advised")
    def _(p: Place, stranger: str = stranger) -> None:
        theirs(p)
        rewritten(p.dir / "hf/config.json", says(model_type=stranger))
        ended = adopt(p, *INSPECT)
        refused(ended, stranger)
        if "did you mean" in ended.err or "?." in ended.err:
            raise Silent(f"another family is advised: {ended.err}")


for stated in ({"max_window_layers": 3}, {}, {"max_window_layers": 28}, {"max_window_layers": 9}):

    @fault(
        ROOM,
        f"config.json of a qwen2 with use_sliding_window, and {stated or 'nothing'} of the layers: no layer slides",
    )
    def _(p: Place, stated: dict[str, int] = stated) -> None:
        theirs(p, "qwen2")

        def change(v: dict[str, Any]) -> None:
            for key in ("layer_types", "max_window_layers"):
                v.pop(key, None)
            v.update(use_sliding_window=True, sliding_window=16, **stated)

        rewritten(p.dir / "hf/config.json", change)
        ended = adopt(p, *INSPECT)
        if told_or_done(ended) and "window: 0" not in ended.out and "window:" in ended.out:
            raise Silent("a window on all layers, where transformers has none")


# --- what lies beside the weights

kind(
    "tokenizer-beside",
    "adopt/test_adopt_command.py::test_what_is_not_whole_is_neither_called_so_nor_imported",
)


def beside(name: str, content: str, file: str = "tokenizer.json") -> None:
    @fault(ROOM, f"{file} {name}")
    def _(p: Place) -> None:
        theirs(p)
        p.file(f"hf/{file}", content)
        refused_by(p, IMPORT, words=(file,))


for file_name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    beside("that is no JSON", "{", file_name)
    beside("that is a list", "[]", file_name)
    beside("that is nested 100,000 deep", "[" * 100_000, file_name)
    beside("that is empty", "", file_name)

kind(
    "adapters",
    "hf/test_peft.py::test_what_is_no_plain_lora_is_refused_by_name",
    "hf/test_peft.py::test_a_pickle_or_a_part_of_a_file_is_not_opened",
    "hf/test_peft.py::test_a_tensor_missing_too_many_or_no_number_is_refused",
)


def adapters(name: str, act: Callable[[Path], object], *words: str) -> None:
    @fault(ROOM, f"adapters {name}")
    def _(p: Place) -> None:
        theirs(p, "qwen3")
        shutil.copytree(GOLDEN / "qwen3_lora", p.dir / "lora")
        act(p.dir / "lora")
        refused_by(p, (*IMPORT, "--adapter", "lora"), words=words)


def adapter_says(**values: Any) -> Callable[[Path], None]:
    return lambda path: rewritten(path / "adapter_config.json", lambda v: v.update(values))


adapters("that are not there", shutil.rmtree, "lora")
adapters(
    "without adapter_config.json",
    lambda path: (path / "adapter_config.json").unlink(),
    "adapter_config",
)
adapters(
    "without their weights",
    lambda path: (path / "adapter_model.safetensors").unlink(),
    "adapter_model",
)
adapters("truncated", lambda path: DAMAGE["truncated"](path / "adapter_model.safetensors"))
adapters("whose config is a list", lambda path: (path / "adapter_config.json").write_text("[]"))
adapters("of another rank", adapter_says(r=8))
adapters("of rank 0", adapter_says(r=0))
adapters("of a rank that is a text", adapter_says(r="4"))
adapters("of DoRA", adapter_says(use_dora=True), "dora")
adapters("of another method", adapter_says(peft_type="IA3"), "IA3")
adapters("with biases", adapter_says(bias="all"), "bias")
adapters("with ranks of their own", adapter_says(rank_pattern={"q_proj": 8}), "rank_pattern")
adapters(
    "with a module that is not here",
    lambda path: replaced(b"q_proj", b"z_proj")(path / "adapter_model.safetensors"),
)
adapters("with layers of their own", adapter_says(layers_to_transform=[0]), "layers_to_transform")

# --- out again

kind("adopted-out")


def out(name: str, arguments: tuple[str, ...], *words: str, code: int = 2) -> None:
    @fault(ROOM, f"export {name}")
    def _(p: Place) -> None:
        p.base()
        p.file("taken/mine.txt", "x")
        before = p.digests(p.run, p.dir / "taken")
        refused(adopt(p, *arguments), *words, code=code)
        p.survive(before)


out("into a directory that is there", ("export", "run", "taken"), "taken")
out("of nothing", ("export", "nowhere", "out"), "nowhere")
out("of a step that is not there", ("export", "run", "out", "--step", "5"), "5")
out("of a step that is a word", ("export", "run", "out", "--step", "last"), "--step")
out("in a dtype that there is not", ("export", "run", "out", "--dtype", "int8"), "dtype")
out("of adapters that there are not", ("export", "run", "out", "--adapter"), "adapters")
out("merged without adapters", ("merge", "run", "out"), "adapters")
out("with a tokenizer that is not there", ("export", "run", "out", "--tokenizer", "gone"), "gone")
out("under a file", ("export", "run", "config.yaml/out"), "config.yaml", code=2)


@fault(ROOM, "bfloat16 comes in and goes out again: the same bytes")
def same_bytes(p: Place) -> None:
    import ml_dtypes
    from safetensors.numpy import load_file

    place = theirs(
        p, "llama3", lambda t: t.update({n: x.astype(ml_dtypes.bfloat16) for n, x in t.items()})
    )
    rewritten(place / "config.json", lambda v: v.update(dtype="bfloat16", torch_dtype="bfloat16"))
    done(adopt(p, *IMPORT))
    done(adopt(p, "export", "out", "back"))
    before, after = (load_file(path / "model.safetensors") for path in (place, p.dir / "back"))
    wrong = [
        n
        for n, x in before.items()
        if n not in after or after[n].dtype != x.dtype or after[n].tobytes() != x.tobytes()
    ]
    if wrong:
        raise Silent(f"{len(wrong)} of {len(before)} tensors are other bytes, such as {wrong[0]}")


# --- configs of others

kind(
    "others-config",
    "adopt/configs/test_converting.py::test_a_file_that_is_none_of_theirs_is_refused",
    "adopt/configs/test_llama_factory.py::test_a_method_that_is_not_here_is_said_at_once_to_change_what_is_learned",
    "adopt/configs/test_llama_factory.py::test_what_cannot_be_taken_over_is_refused_with_key_and_line",
    "adopt/configs/test_deepspeed.py::test_what_changes_what_is_learned_is_said_at_once",
    "adopt/configs/test_deepspeed.py::test_a_key_becomes_ours",
)
FACTORY = (
    "model_name_or_path: hf\nstage: sft\ndo_train: true\nfinetuning_type: full\ndataset: mine\noutput_dir: "
    "run\nmax_steps: 10\n"
)
DEEPSPEED = '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}'


def other(name: str, text: str, *words: str, file: str = "theirs.yaml") -> None:
    @fault(ROOM, f"adopt config: {name}")
    def _(p: Place) -> None:
        p.file(file, text)
        refused(adopt(p, "config", file), *words)


def learned(name: str, more: str, key: str) -> None:
    """What changes what is learned is said on standard error, or refused, by its name."""

    @fault(ROOM, f"adopt config: {name} is said")
    def _(p: Place) -> None:
        of_deepspeed = more.startswith(",")
        path = p.file(
            "theirs.json" if of_deepspeed else "theirs.yaml",
            f"{DEEPSPEED}{more}}}" if of_deepspeed else FACTORY + more,
        )
        ended = adopt(p, "config", path.name)
        if ended.code == 0:
            if key not in ended.err:
                raise Silent(f"{key} is dropped without a word on standard error")
        else:
            refused(ended, key)


def becomes(name: str, text: str, *lines: str, file: str = "theirs.yaml") -> None:
    """Translated as it is there."""

    @fault(ROOM, f"adopt config: {name}")
    def _(p: Place) -> None:
        p.file(file, text)
        ended = adopt(p, "config", file)
        done(ended)
        for line in lines:
            if line not in ended.out and line.partition(":")[0].strip() not in ended.err:
                raise Silent(f"it does not become {line!r}")


other("nothing", "", file="theirs.yaml")
other("a list", "- 1\n")
other("no JSON", "{", file="theirs.json")
other("one of ours", "train: {steps: 3}\n", "LLaMA-Factory|DeepSpeed")
other("a key twice", FACTORY + "stage: pt\n", "stage", "twice")
other("a misspelt key", FACTORY + "learning_rte: 1.0e-4\n", "did you mean learning_rate")
other("nested 3,000 deep", "stage: " + "[" * 3000)
other("a stage that is not here", FACTORY.replace("sft", "ppo"), "stage")
other("a learning rate that is a word", FACTORY + "learning_rate: fast\n", "learning_rate")
other("a cutoff below zero", FACTORY + "cutoff_len: -1\n", "cutoff_len|sequence_length")
other(
    "steps that are a list",
    FACTORY + "gradient_accumulation_steps: [2]\n",
    "gradient_accumulation_steps",
)
other("a file to predict alone", FACTORY.replace("do_train: true\n", "do_predict: true\n"), "train")
for key, value in (
    ("adapter_name_or_path", "saves/sft"),
    ("rope_scaling", "linear"),
    ("resize_vocab", "true"),
    ("add_tokens", "x"),
    ("fp8", "true"),
    ("use_asft_loss", "true"),
    ("use_eaft_loss", "true"),
    ("neftune_noise_alpha", "5"),
    ("max_samples", "100"),
    ("quantization_bit", "4"),
    ("shift_attn", "true"),
    ("use_dora", "true"),
    ("use_galore", "true"),
    ("loraplus_lr_ratio", "16.0"),
    ("train_on_prompt", "true"),
    ("pissa_init", "true"),
    ("mixture_of_depths", "convert"),
    ("use_badam", "true"),
):
    learned(f"LLaMA-Factory's {key}", f"{key}: {value}\n", key)
for key, more in (
    ("curriculum_learning", ', "curriculum_learning": {"enabled": true}'),
    ("data_efficiency", ', "data_efficiency": {"enabled": true}'),
    ("progressive_layer_drop", ', "progressive_layer_drop": {"enabled": true}'),
    ("loss_scale", ', "fp16": {"enabled": true, "loss_scale": 128}'),
    (
        "compression_training",
        ', "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": true}}}',
    ),
):
    learned(f"DeepSpeed's {key}", more, key)
becomes("LLaMA-Factory's sgd has no momentum", FACTORY + "optim: sgd\n", "beta1: 0.0")
becomes(
    "DeepSpeed's SGD has no momentum",
    DEEPSPEED.replace("AdamW", "SGD") + "}",
    "beta1: 0.0",
    file="theirs.json",
)
becomes(
    "DeepSpeed without a scheduler has a constant rate",
    DEEPSPEED + "}",
    "schedule: constant",
    file="theirs.json",
)
learned(
    "DeepSpeed's logarithmic warm-up",
    ', "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
    "warmup",
)

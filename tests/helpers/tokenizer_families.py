"""Tiny tokenizers of the structure that well-known families have (normalizer, pre-tokenizer, model, post-processor,
decoder), made by code, with the files beside them; `experiments/adopt/texts.py` compares them with transformers.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

TEXTS = (
    "the mesh", "", " ", "  two  spaces ", "a\nb\n\nc", "naïve 日本語 🙂", "x<|end|>y", "1234567 tokens", "it's MESH'll", "\ttab",
)  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(special: tuple[str, ...], split: str | None = None) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "the", "Ġm", "es", "Ġmes", "Ġmesh"]
    ids = {token: i for i, token in enumerate([*letters, *words])}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "m"),
        ("e", "s"),
        ("Ġm", "es"),
        ("Ġmes", "h"),
    ]
    made = Tokenizer(models.BPE(ids, merges))
    if split is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        parts = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
        made.pre_tokenizer = pre_tokenizers.Sequence(parts)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    made.add_special_tokens(list(special))
    return made


def _sentencepiece(special: tuple[str, ...], prepend: bool = True) -> Tokenizer:
    """BPE over ▁ with a fallback to bytes, as Llama 2 and Gemma have it."""
    tokens = [
        *special,
        *(f"<0x{i:02X}>" for i in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz0123456789",
        "▁m",
        "es",
        "▁mes",
    ]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "m"), ("e", "s"), ("▁m", "es")]
    made = Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", "▁")
    made.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace])
        if prepend
        else replace
    )
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    made.add_special_tokens(list(special))
    return made


def _around(made: Tokenizer, template: str, *before: Any) -> Tokenizer:
    names = [word for word in template.split() if not word.startswith("$")]
    named = [(name, made.token_to_id(name)) for name in dict.fromkeys(names)]
    processor = processors.TemplateProcessing(template, special_tokens=named)
    made.post_processor = (
        processors.Sequence([*before, processor]) if before else processor
    )
    return made


def _llama2() -> Tokenizer:
    return _around(_sentencepiece(("<unk>", "<s>", "</s>")), "<s> $A")


def _llama3() -> Tokenizer:
    made = _byte_level(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>"), SPLIT
    )
    return _around(
        made, "<|begin_of_text|> $A", processors.ByteLevel(trim_offsets=False)
    )


def _qwen2() -> Tokenizer:
    made = _byte_level(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>"), SPLIT
    )
    made.normalizer = normalizers.NFC()
    return made


def _deepseek() -> Tokenizer:
    made = _byte_level(
        (
            "<｜end▁of▁sentence｜>",
            "<｜begin▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
        ),
        SPLIT,
    )
    return _around(
        made, "<｜begin▁of▁sentence｜> $A", processors.ByteLevel(trim_offsets=False)
    )


def _gemma() -> Tokenizer:
    made = _sentencepiece(
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        prepend=False,
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return _around(made, "<bos> $A")


def _mistral() -> Tokenizer:
    made = _byte_level(("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), SPLIT)
    return _around(made, "<s> $A")


def _phi3() -> Tokenizer:
    made = _sentencepiece(("<unk>", "<s>", "</s>"))
    made.add_tokens(
        [
            AddedToken(t, special=True, rstrip=True)
            for t in ("<|endoftext|>", "<|end|>", "<|user|>")
        ]
    )
    return made


def _command_r() -> Tokenizer:
    made = _byte_level(
        ("<PAD>", "<UNK>", "<BOS_TOKEN>", "<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
    )
    made.normalizer = normalizers.NFC()
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return _around(made, "<BOS_TOKEN> $A")


def _t5() -> Tokenizer:
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁the", -1.0),
        ("▁m", -2.5),
        ("es", -2.5),
    ]
    made = Tokenizer(
        models.Unigram(
            [*pieces, *((c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz")], unk_id=2
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return _around(made, "$A </s>")


def _bert() -> Tokenizer:
    tokens = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "me",
        "##sh",
        *"abcxyz",
        *(f"##{c}" for c in "abcxyz"),
    ]
    made = Tokenizer(
        models.WordPiece(
            {token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"
        )
    )
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(tokens[:5])
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def _object(content: str) -> dict[str, Any]:
    """A token as DeepSeek's files have it."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": content, **flags}


# By name: the tokenizer, tokenizer_config.json, config.json, generation_config.json; then (the ids that a text begins
# with, the end of a document, its source). Written down, and compared with what transformers says by the experiment.
NAMED = "tokenizer_config.json"
FAMILIES: dict[
    str,
    tuple[
        Callable[[], Tokenizer],
        dict[str, Any],
        dict[str, Any],
        tuple[str, ...],
        str,
        str,
    ],
] = {
    "llama2": (
        _llama2,
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
        },
        {"eos_token_id": 2},
        ("<s>",),
        "</s>",
        NAMED,
    ),
    "llama3": (
        _llama3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        {"eos_token_id": [263, 264]},
        ("<|begin_of_text|>",),
        "<|end_of_text|>",
        NAMED,
    ),
    "qwen2": (
        _qwen2,
        {"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False},
        {"eos_token_id": 262},
        (),
        "<|endoftext|>",
        NAMED,
    ),
    "deepseek": (
        _deepseek,
        {
            "bos_token": _object("<｜begin▁of▁sentence｜>"),
            "eos_token": _object("<｜end▁of▁sentence｜>"),
            "add_bos_token": True,
        },
        {"eos_token_id": 262},
        ("<｜begin▁of▁sentence｜>",),
        "<｜end▁of▁sentence｜>",
        NAMED,
    ),
    "gemma": (
        _gemma,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
        {"eos_token_id": 1},
        ("<bos>",),
        "<eos>",
        NAMED,
    ),
    "mistral": (
        _mistral,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {"eos_token_id": 264},
        ("<s>",),
        "</s>",
        NAMED,
    ),
    "gpt2": (
        lambda: _byte_level(("<|endoftext|>", "<|end|>")),
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        {"eos_token_id": 262},
        (),
        "<|endoftext|>",
        NAMED,
    ),
    "phi3": (
        _phi3,
        {
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "add_bos_token": False,
        },
        {"eos_token_id": 299},
        (),
        "<|endoftext|>",
        NAMED,
    ),
    "command_r": (
        _command_r,
        {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
        {"eos_token_id": 266},
        ("<BOS_TOKEN>",),
        "<|END_OF_TURN_TOKEN|>",
        NAMED,
    ),
    "t5": (
        _t5,
        {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        {"eos_token_id": 1},
        (),
        "</s>",
        NAMED,
    ),
    "bert": (
        _bert,
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"},
        {},
        ("[CLS]",),
        "[SEP]",
        "the post-processor of tokenizer.json",
    ),
    "kimi": (
        lambda: _byte_level(("[BOS]", "[EOS]", "<|im_end|>", "<|end|>"), SPLIT),
        {"bos_token": "[BOS]", "eos_token": "[EOS]"},
        {"eos_token_id": 263},
        (),
        "[EOS]",
        NAMED,
    ),
    "olmo": (
        lambda: _byte_level(("<|endoftext|>", "<|padding|>")),
        {"bos_token": None, "eos_token": "<|endoftext|>"},
        {"eos_token_id": 262},
        (),
        "<|endoftext|>",
        NAMED,
    ),
    "falcon": (
        lambda: _byte_level((">>TITLE<<", "<|endoftext|>")),
        {"eos_token": "<|endoftext|>"},
        {"bos_token_id": 263, "eos_token_id": 263},
        (),
        "<|endoftext|>",
        NAMED,
    ),
    "renamed_chatml": (
        lambda: _byte_level(("<|fin|>", "<|im_start|>", "<|im_end|>")),
        {"eos_token": "<|im_end|>"},
        {"eos_token_id": 264},
        (),
        "<|im_end|>",
        NAMED,
    ),
}


def write(name: str, folder: Path) -> Path:
    """Writes a family's files, and returns its tokenizer.json."""
    make, tokenizer_config, config, *_ = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer_config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    # of a model type that transformers knows and no tokenizer class of its own follows from
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"

"""A tiny model as a Hugging Face directory, with a tokenizer and a chat template: random weights, but far from uniform
in what they say.
"""

import json
from pathlib import Path
from typing import Any

import jax

import meshtrain as mt
from experiments.bench import config_of
from meshtrain.adopt.exporting import export, live_source

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)
BEGIN, END, TURN = "<|begin|>", "</s>", "<|end|>"
LENGTH = 64  # positions
SIZES: dict[str, Any] = {
    "layers": 2,
    "d_model": 32,
    "heads": 4,
    "d_ff": 48,
    "vocab_size": 320,
}
FAMILIES = {"llama": {"kv_heads": 2}, "gpt2": {"max_positions": LENGTH}}


def tiny(directory: Path, family: str = "llama", text: str = "") -> Path:
    """Writes one to `directory` / `family`: llama with a BOS that its tokenizer puts before each text, gpt2 without.

    `text` trains the tokenizer.
    """
    beside = directory / f"{family}-tokenizer"
    beside.mkdir(parents=True)
    begins = family == "llama"
    tokenizer = _tokenizer(text or Path(__file__).read_text(), begins)
    tokenizer.save(str(beside / "tokenizer.json"))
    named = {
        "bos_token": BEGIN if begins else END,
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (beside / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named)
    )
    sizes = {"family": family, **SIZES, **FAMILIES[family]}
    config = config_of(sizes, {}, 16, LENGTH, {"zero_stage": 0}, "float32")
    program = mt.Program(config)
    # at its initial scale a model finds all tokens about as likely
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, program.init().params)
    ids = {
        "bos_token_id": tokenizer.token_to_id(named["bos_token"]),
        "eos_token_id": tokenizer.token_to_id(END),
    }
    files = {path.name: path for path in beside.iterdir()}
    export(
        config,
        live_source(program.layout, params),
        directory / family,
        "float32",
        files,
        ids,
    )
    return directory / family


def _tokenizer(text: str, begins: bool) -> Any:
    """A byte-level BPE of 300 ids, and the special tokens among them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [BEGIN, END, TURN]
    made.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A",
            pair=f"{BEGIN} $A {BEGIN} $B",
            special_tokens=[(BEGIN, made.token_to_id(BEGIN))],
        )
    return made

"""Small models of Hugging Face's with a tokenizer, as a language model that can be talked to has one."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from golden import GOLDEN
from tokenizers import Tokenizer, decoders, models, normalizers, processors

SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>", "<|model|>", "<|end|>")
LETTERS = "▁abcdefghijklmnopqrstuvwxyz.,:?!'"  # as sentencepiece has it, ▁ for a space
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|model|>{{ message.content }}<|end|>{% else %}<|user|>{{ message.content "
    "}}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|model|>{% endif %}"
)


def tokenizer() -> Tokenizer:
    """A letter a token; a space before a text as Llama 2 has it, and <s> before it."""
    ids = {token: i for i, token in enumerate((*SPECIAL, *LETTERS))}
    made = Tokenizer(models.BPE(ids, [], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", ids["<s>"])]
    )
    made.add_special_tokens(list(SPECIAL))
    return made


def hugging_face(directory: Path, family: str = "llama3", chat: bool = True) -> Path:
    """A golden model with a tokenizer beside it, and with `chat` a template."""
    shutil.copytree(GOLDEN / family, directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | (
        {"chat_template": TEMPLATE} if chat else {}
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory

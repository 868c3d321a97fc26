"""A tokenizer of bytes with special tokens, and the files that say how texts begin and end beside it."""

import json
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, models, processors

DEEPSEEK_END, DEEPSEEK_BEGIN = "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"


def written(
    folder: Path,
    special=(DEEPSEEK_END, DEEPSEEK_BEGIN),
    processor=None,
    first: int = 300,
    **files,
) -> Path:
    """A tokenizer of bytes with special tokens from the id `first` on, and JSON files beside it."""
    folder.mkdir(exist_ok=True)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    ids = {letter: i for i, letter in enumerate(sorted(letters))} | {
        f"ab{n}": n for n in range(256, first)
    }
    made = Tokenizer(models.BPE(ids, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(special))
    if processor is not None:
        named = [(token, made.token_to_id(token)) for token in special]
        made.post_processor = processors.TemplateProcessing(
            processor, special_tokens=named
        )
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return folder / "tokenizer.json"

"""Writes what transformers makes of conversations, ids and masks, which the tests hold ours against:
tests/data/golden/chats/, whose conversations stand there.

The tokenizer is trained here on a few words; like Llama's it puts the beginning of text before whatever it is given,
unless told not to.

pip install -e '.[parity]' && python -m experiments.adopt.chats
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from experiments import bench

WHERE = Path(__file__).resolve().parents[2] / "tests" / "data" / "golden" / "chats"
SPECIAL = ["<s>", "<|turn|>", "<|end|>"]


def main() -> None:
    bench.parser(__doc__).parse_args()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["user assistant system the mesh of shards a token of the mesh"] * 3, trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(WHERE / "tokenizer.json"), pretty=False)
    (WHERE / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}) + "\n"
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(WHERE / "tokenizer.json"), bos_token="<s>"
    )
    template, found = (WHERE / "chat_template.jinja").read_text(), []
    for held in json.loads((WHERE / "conversations.json").read_text()):
        messages = held["messages"]
        made = theirs.apply_chat_template(
            messages,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found.append(
            {
                "messages": messages,
                "ids": made["input_ids"],
                "learned": made["assistant_masks"],
            }
        )
    lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in found)
    (WHERE / "conversations.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

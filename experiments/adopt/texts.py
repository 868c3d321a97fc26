"""Compares how tiny tokenizers of well-known families read, begin, end and write texts with transformers.

    python -m experiments.adopt.texts --python VENV/bin/python      a Python that has transformers, tokenizers and jinja2
    python -m experiments.adopt.texts --write                       what it says, into tests/data/golden/texts.json

The files of the tokenizers are written by `tests/helpers/tokenizer_families.py`;
`tests/data/test_tokenizer_families.py` holds what transformers said of them without it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments import bench

TESTS = Path(__file__).parents[2] / "tests"
GOLDEN = TESTS / "data" / "golden" / "texts.json"
# What runs in the other Python: a line of JSON with all that is compared.
ASK = """
import json, sys
from transformers import AutoTokenizer, PreTrainedTokenizerFast
folders, texts = json.loads(sys.stdin.read())
said = {}
for name, folder in folders.items():
    t = PreTrainedTokenizerFast.from_pretrained(folder)
    said[name] = {
        "version": __import__("transformers").__version__,
        "begun": [t(text).input_ids for text in texts],
        "special": [t(text, add_special_tokens=False).input_ids for text in texts],
        "plain": [t(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in texts],
        "offsets": [t(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping for text in texts],
        "decoded": [t.decode(t(text, add_special_tokens=False).input_ids, skip_special_tokens=True) for text in texts],
        "spelt": [t.decode(t(text, add_special_tokens=False).input_ids) for text in texts],
        "bos": t.bos_token_id, "eos": t.eos_token_id,
    }
print(json.dumps(said))
"""


def theirs(python: str) -> dict:
    sys.path.insert(0, str(TESTS / "helpers"))
    from tokenizer_families import FAMILIES, TEXTS, write

    with tempfile.TemporaryDirectory() as folder:
        folders = {
            name: str(write(name, Path(folder) / name).parent) for name in FAMILIES
        }
        asked = json.dumps([folders, TEXTS])
        result = subprocess.run(
            [python, "-c", ASK], input=asked, capture_output=True, text=True, check=True
        )
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    said = theirs(options.python)
    if options.write:
        GOLDEN.write_text(
            json.dumps(said, ensure_ascii=False, separators=(",", ":")) + "\n"
        )
        return
    held = json.loads(GOLDEN.read_text())
    for name, facts in said.items():
        wrong = [
            what
            for what in facts
            if what != "version" and facts[what] != held[name][what]
        ]
        print(f"{name:16} {'as held' if not wrong else 'other ' + ', '.join(wrong)}")


if __name__ == "__main__":
    main()

"""The tokenizer and the chat template of a run, copied into its directory: a run can be used wherever it lies.

    RUN/tokenizer/    tokenizer.json, the files beside it that say how texts begin and end, and the template

Training reads the originals; whoever opens the run later reads the copies, so that a file that was edited or moved
since does not change what the run is.
"""

import filecmp
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshtrain.config import Config
from meshtrain.config.places import local
from meshtrain.data.boundaries import IMPORTED, MODEL, TOKENIZER, companion_files
from meshtrain.errors import say, short
from meshtrain.files import write_atomically

COPIES = "tokenizer"  # in the run directory
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
# Other forms of the vocabulary, which other programs want of an export.
FORMS = ("tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt", TEMPLATE)


def keep(config: Config, run_directory: Path) -> None:
    """Copies what a run reads its texts with, and says so where the run had another."""
    for name, original in _originals(config):
        copy = run_directory / COPIES / name
        if copy.is_file():
            if filecmp.cmp(copy, original, shallow=False):
                continue
            say(
                f"{short(original)} has changed since this run was last started; it goes on with the new one."
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, original.read_bytes())


def opened_from(data: Mapping[str, Any], run_directory: Path) -> dict[str, Any]:
    """Returns the section data of a run with the copies in the place of the originals, as far as there are any."""
    values = dict(data)
    copies = (run_directory / COPIES).absolute()
    if values.get("tokenizer", "byte") != "byte" and (copies / TOKENIZER).is_file():
        values["tokenizer"] = str(copies / TOKENIZER)
    if (
        values.get("template") is not None
        and (copies / _template_name(values["template"])).is_file()
    ):
        values["template"] = str(copies / _template_name(values["template"]))
    return values


def _originals(config: Config) -> Iterator[tuple[str, Path]]:
    data = config.data
    if data.tokenizer != "byte":
        tokenizer = Path(data.tokenizer).expanduser()
        files = companion_files(tokenizer) | {
            name: tokenizer.parent / name for name in FORMS
        }
        if config.model.weights is not None:
            files[IMPORTED] = local(config.model.weights, config.data.cache_gib) / MODEL
        more = tokenizer.parent / TEMPLATES
        files |= {
            f"{TEMPLATES}/{path.name}": path for path in sorted(more.glob("*.jinja"))
        }
        yield from (
            (name, path)
            for name, path in files.items()
            if path.is_file() and name != _template_name(data.template)
        )
    if data.template is not None:
        yield _template_name(data.template), Path(data.template).expanduser()


def _template_name(template: str | None) -> str:
    if template is None:
        return ""
    return "chat_template.json" if template.endswith(".json") else TEMPLATE

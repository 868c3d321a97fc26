"""What lies beside the weights: the tokenizer's files, and what a config.json says that is no part of the model.

    HF_DIR/  tokenizer.json ...  config.json                 imported: both are kept
    OUT/     tokenizer.json ...  hf_config.json              a checkpoint; config.json would make it a directory of Hugging Face's
    HF_OUT/  tokenizer.json ...  config.json                 exported, by this run or by one that began with OUT or HF_DIR

Without them others cannot use the weights.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshtrain.config import Config
from meshtrain.config.theirs import CONFIG, MODEL_TYPES, read_json
from meshtrain.errors import ConfigError, short
from meshtrain.run.directory import CHECKPOINTS

KEPT, TEMPLATE = "hf_config.json", "chat_template.jinja"
# Without all of them llama.cpp and others cannot use a model.
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    TEMPLATE, "generation_config.json",
)  # fmt: skip
# Of these a tokenizer is made; the others say more of it.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What a config.json says that the section model does not.
CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
LABELS = ("id2label", "label2id")  # the same, where there are as many classes as before


def keep(directory: Path, to: Path) -> None:
    """Copies what lies beside the weights of a Hugging Face directory to a checkpoint's."""
    given = {"_name_or_path": str(directory.absolute())} | read_json(directory / CONFIG)
    (to / KEPT).write_text(json.dumps(given, indent=2) + "\n")
    copy_tokenizer(tokenizer_files(directory), to)


def tokenizer_files(directory: Path) -> dict[str, Path]:
    """The tokenizer's files in a directory, by name; none where only what says more of one is there."""
    found = {name: directory / name for name in TOKENIZER if (directory / name).is_file()}
    return found if any(name in found for name in VOCABULARIES) else {}


def copy_tokenizer(files: Mapping[str, Path], to: Path) -> None:
    for name, path in files.items():
        shutil.copyfile(path, to / name)


def origins(root: Path, config: Config) -> Iterator[Path]:
    """Where what belongs to a run's weights may lie, the nearest first: the run, what it began with."""
    yield run_of(root)
    if config.model.weights is not None:
        yield Path(config.model.weights).expanduser()
    if config.checkpoint.resume not in ("auto", "never"):
        yield run_of(Path(config.checkpoint.resume).expanduser())


def run_of(path: Path) -> Path:
    """The run directory of a path that names it, its checkpoints/ or one step."""
    path = path.absolute()
    for parent in (path, *path.parents[:2]):
        if parent.name == CHECKPOINTS:
            return parent.parent
    return path


def found_tokenizer(root: Path, config: Config) -> dict[str, Path]:
    """The files of a run's tokenizer: those beside data.tokenizer, which it was trained with, else those of its weights; {} for none.

    The chat template is the one that it was trained with, too.
    """
    found = _of_run(root, config)
    if config.data.template is not None and found:
        path = Path(config.data.template).expanduser()
        found.pop(TEMPLATE, None)
        found["tokenizer_config.json" if path.suffix == ".json" else TEMPLATE] = path
    return found


def _of_run(root: Path, config: Config) -> dict[str, Path]:
    if config.data.tokenizer != "byte":
        own = Path(config.data.tokenizer).expanduser()
        if own.is_file():
            # the file itself, whatever its name is
            return tokenizer_files(own.parent) | {"tokenizer.json": own}
    return next(filter(None, map(tokenizer_files, origins(root, config))), {})


def found_config(root: Path, config: Config) -> dict[str, Any]:
    """The config.json of what a run began with; {} if there is none any more, or it is of another family."""
    for directory in origins(root, config):
        for path in (directory / KEPT, directory / CONFIG):
            if path.is_file() and (given := read_json(path)).get("model_type") == MODEL_TYPES.get(config.model.family):
                return given
    return {}


def check_tokenizer(files: Mapping[str, Path], vocab_size: int) -> None:
    """ConfigError where a tokenizer has ids that the model's embedding has no row for."""
    path = files.get("tokenizer.json")
    if path is None:
        return
    given = read_json(path)
    try:
        vocabulary = given["model"].get("vocab", {})
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        largest = max([*ids, *(token["id"] for token in given.get("added_tokens") or ())], default=-1)
        fits = largest < vocab_size
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{short(path)} is no tokenizer.json: it has no vocabulary.") from None
    if not fits:
        raise ConfigError(
            f"the tokenizer {short(path)} has the id {largest}, but the model's vocabulary is {vocab_size}; give the right one with --tokenizer DIR."
        )


def written_config(given: dict[str, Any], theirs: Mapping[str, Any]) -> str:
    """config.json of a model of ours with what `theirs`, of which it came, says besides."""
    carried = {key: theirs[key] for key in CARRIED if theirs.get(key) is not None}
    if "max_position_embeddings" in given and "max_position_embeddings" in carried:
        carried["max_position_embeddings"] = max(carried["max_position_embeddings"], given["max_position_embeddings"])
    if len(theirs.get("id2label") or ()) == len(given.get("id2label", ())):
        carried |= {key: theirs[key] for key in LABELS if key in theirs and key in given}
    return json.dumps(given | carried, indent=2) + "\n"

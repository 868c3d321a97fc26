"""The files beside weights: a tokenizer's, and the fields of a config.json that the model's section lacks.

A directory is written so:

    HF_DIR/  tokenizer.json ...  config.json      imported: both are copied
    OUT/     tokenizer.json ...  hf_config.json   a checkpoint; config.json would make it a Hugging Face directory
    HF_OUT/  tokenizer.json ...  config.json      exported by this run, or by one that began with OUT or HF_DIR

Without them others cannot use the weights. HF_OUT and OUT are complete or not there; nothing is written over:

    OUT.writing/   being filled, its .lock held; a process that was killed leaves it, at whatever moment, and the
                   next one to write OUT removes it
    OUT/           all of it

Runs, which are written to for weeks, have `meshtrain.checkpoint.steps` for the same.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshtrain import hub
from meshtrain.config import Config
from meshtrain.config.places import local
from meshtrain.data.copies import COPIES, TEMPLATES
from meshtrain.errors import ConfigError, refusal, short
from meshtrain.files import sync
from meshtrain.hf_families import CONFIG, MODEL_TYPES, read_json
from meshtrain.hf_families.generation import GENERATION, IDS, SAMPLING, problems
from meshtrain.run.directory import CHECKPOINTS

HF_CONFIG = "hf_config.json"
TEMPLATE = "chat_template.jinja"
DTYPES = "_dtypes"  # in HF_CONFIG: of the imported tensors, by name
WRITING = ".writing"
LOCK = ".lock"
# Without all of them llama.cpp and others cannot use a model.
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
    GENERATION,
)
# One of these makes a tokenizer; the others say more of it.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Fields of a config.json that the section model has no keys for.
CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
# Carried too, where there are as many classes as before
LABELS = ("id2label", "label2id")


def _files(directory: Path) -> dict[str, Path]:
    more = sorted((directory / TEMPLATES).glob("*.jinja"))
    names = (*TOKENIZER, *(f"{TEMPLATES}/{path.name}" for path in more))
    return {name: directory / name for name in names if (directory / name).is_file()}


def check(directory: Path) -> None:
    """ConfigError where one of the tokenizer's files, or what generation begins with, is not JSON, or the tokenizer has
    no vocabulary.
    """
    files = _files(directory)
    for path in files.values():
        if path.suffix == ".json":
            content = read_json(path)
        if (
            path.name == GENERATION
            and (problem := next(problems(content, SAMPLING | IDS), None)) is not None
        ):
            raise ConfigError(f"{short(directory)}: {problem}")
    _largest_id(files)


def copy(directory: Path, to: Path, dtypes: Mapping[str, str]) -> None:
    """Copies the files beside a Hugging Face directory's weights into a checkpoint's run directory, with the dtype of
    each of its tensors.
    """
    fields = (
        {"_name_or_path": hub.repository_of(directory) or str(directory.absolute())}
        | read_json(directory / CONFIG)
        | {DTYPES: dtypes}
    )
    (to / HF_CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    copy_tokenizer(tokenizer_files(directory), to)


def tokenizer_files(directory: Path) -> dict[str, Path]:
    """Returns the tokenizer's files in a directory, by name; none without a vocabulary."""
    files = _files(directory)
    return files if any(name in files for name in VOCABULARIES) else {}


def copy_tokenizer(files: Mapping[str, Path], to: Path) -> None:
    for name, path in files.items():
        (to / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, to / name)


def _origins(root: Path, config: Config) -> Iterator[Path]:
    """Yields the directories that may have the files beside a run's weights: the run's, then that which it began
    with.
    """
    yield run_of(root)
    if config.model.weights is not None:
        yield run_of(root) / COPIES
        yield local(config.model.weights, config.data.cache_gib)
    if config.checkpoint.resume not in ("auto", "never"):
        yield run_of(Path(config.checkpoint.resume).expanduser())


def run_of(path: Path) -> Path:
    """Returns the run directory of a path that names it, its checkpoints/ or one step."""
    path = path.absolute()
    for parent in (path, *path.parents[:2]):
        if parent.name == CHECKPOINTS:
            return parent.parent
    return path


def find_tokenizer(root: Path, config: Config) -> dict[str, Path]:
    """Returns the files of a run's tokenizer: those beside data.tokenizer, which it was trained with, else those of its
    weights; {} for none.

    The chat template is the one that it was trained with, too.
    """
    own = Path(config.data.tokenizer).expanduser()
    if config.data.tokenizer != "byte" and own.is_file():
        # the file itself, whatever its name is
        files = tokenizer_files(own.parent) | {"tokenizer.json": own}
    else:
        files = next(filter(None, map(tokenizer_files, _origins(root, config))), {})
    if config.data.template is not None and files:
        path = Path(config.data.template).expanduser()
        files = {
            n: p
            for n, p in files.items()
            if n != TEMPLATE and not n.startswith(TEMPLATES)
        }
        files["tokenizer_config.json" if path.suffix == ".json" else TEMPLATE] = path
    return files


def find_hf_config(root: Path, config: Config) -> dict[str, Any]:
    """Returns the config.json of the weights that a run began with; {} if there is none any more, or it is of another
    family.
    """
    for directory in _origins(root, config):
        for path in (directory / HF_CONFIG, directory / CONFIG):
            if path.is_file() and (fields := read_json(path)).get(
                "model_type"
            ) == MODEL_TYPES.get(config.model.family):
                return fields
    return {}


def check_tokenizer(files: Mapping[str, Path], vocab_size: int) -> None:
    """ConfigError where a tokenizer has ids that the model's embedding has no row for."""
    largest = _largest_id(files)
    if largest >= vocab_size:
        tokenizer = short(files["tokenizer.json"])
        sizes = f"the id {largest}, but the model's vocabulary is {vocab_size}"
        raise ConfigError(
            f"the tokenizer {tokenizer} has {sizes}; give the right one with --tokenizer DIR."
        )


def _largest_id(files: Mapping[str, Path]) -> int:
    """Returns the largest id of a tokenizer.json, -1 without one; ConfigError where it has no vocabulary."""
    path = files.get("tokenizer.json")
    if path is None:
        return -1
    content = read_json(path)
    try:
        vocabulary = content["model"].get("vocab", {})
        ids = (
            list(vocabulary.values())
            if isinstance(vocabulary, dict)
            else list(range(len(vocabulary)))
        )
        return int(
            max(
                [*ids, *(token["id"] for token in content.get("added_tokens") or ())],
                default=-1,
            )
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ConfigError(
            f"{short(path)} is not a tokenizer.json: it has no vocabulary."
        ) from None


def merged_config(fields: dict[str, Any], original: Mapping[str, Any]) -> str:
    """Returns config.json of a model of ours with what the `original`, of which it came, says besides."""
    carried = {key: original[key] for key in CARRIED if original.get(key) is not None}
    if "max_position_embeddings" in fields and "max_position_embeddings" in carried:
        carried["max_position_embeddings"] = max(
            carried["max_position_embeddings"], fields["max_position_embeddings"]
        )
    if len(original.get("id2label") or ()) == len(fields.get("id2label", ())):
        carried |= {
            key: original[key] for key in LABELS if key in original and key in fields
        }
    return json.dumps(fields | carried, indent=2) + "\n"


# --- directories that are complete or not there


def refuse_existing(to: Path) -> None:
    """ConfigError if there is something of that name: asked before the work begins."""
    if os.path.lexists(to):
        raise ConfigError(
            f"{short(to)} already exists, and nothing is overwritten; give another directory."
        )


@contextlib.contextmanager
def written_aside(to: Path) -> Iterator[Path]:
    """Yields a directory to fill, which is renamed to `to` once the block ends well; else it is removed.

    ConfigError, in a sentence, if `to` is there already, another process is writing it, or the system refuses.
    """
    refuse_existing(to)
    aside = to.with_name(to.name + WRITING)
    try:
        with _locked_empty(aside):
            try:
                yield aside
                for folder, _, files in os.walk(aside):
                    for path in (*(Path(folder, name) for name in files), Path(folder)):
                        sync(path)
                os.rename(aside, to)
            except BaseException:
                # a full disk needs the room
                with contextlib.suppress(OSError):
                    _empty(aside)
                    shutil.rmtree(aside)
                raise
            # Not before the rename: what a killed process leaves without its lock would be taken for somebody's.
            with contextlib.suppress(OSError):
                (to / LOCK).unlink()
            sync(to.parent)
    except OSError as error:
        raise ConfigError(f"{short(to)} cannot be written: {refusal(error)}.") from None
    except Exception as error:
        # safetensors has no class of its own for what the system refuses
        if type(error).__name__ != "SafetensorError":
            raise
        reason = (
            re.sub(r" \(os error \d+\)$", "", str(error)).rpartition(": ")[2].lower()
        )
        raise ConfigError(f"{short(to)} cannot be written: {short(reason)}.") from None


@contextlib.contextmanager
def _locked_empty(aside: Path) -> Iterator[None]:
    """Makes an empty directory, and locks it.

    Files that a killed process left there are removed; files of anybody else are not.
    """
    if os.path.lexists(aside) and not _is_ours(aside):
        raise ConfigError(
            f"{short(aside)} is needed while writing; it is somebody's, so move it away."
        )
    aside.mkdir(parents=True, exist_ok=True)
    with open(aside / LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {short(aside)}.") from None
        _empty(aside)
        yield


def _is_ours(aside: Path) -> bool:
    """Returns whether a directory has our lock in it; a process that was killed before it had one left nothing."""
    return (
        not aside.is_symlink()
        and aside.is_dir()
        and ((aside / LOCK).is_file() or not any(aside.iterdir()))
    )


def _empty(aside: Path) -> None:
    """Removes all but the lock: a process that is killed meanwhile leaves a directory that is still ours."""
    for path in [path for path in aside.iterdir() if path.name != LOCK]:
        shutil.rmtree(
            path
        ) if path.is_dir() and not path.is_symlink() else path.unlink()

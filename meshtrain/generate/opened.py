"""A model that is opened to be used: its weights on a mesh, its tokenizer, the tokens that end a text, its chat template.

    RUN, checkpoints/12, an import, HF_DIR ── config ──► which mesh ── weights ──► Model
                                           ├─ tokenizer.json, or bytes ──► tokenizer ─┬─► ends: what a model says last
                                           ├─ config.json, generation_config.json ────┤
                                           └─ chat_template.jinja ────────────────────┴─► Conversations

Nothing of the run is locked or written.
"""

import argparse
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from meshtrain.adopt import beside
from meshtrain.config import Config, replaced
from meshtrain.config.schema import PrecisionConfig
from meshtrain.config.theirs import CONFIG, is_theirs, read_json
from meshtrain.data.template import find_template
from meshtrain.data.tokenizer import ByteTokenizer, ChatTokenizer, load_tokenizer
from meshtrain.errors import ConfigError, nearest, short
from meshtrain.families import FAMILIES
from meshtrain.generate.devices import choose
from meshtrain.generate.prompts import Conversations
from meshtrain.mesh import make_mesh
from meshtrain.reader import Model, read_config, read_model

GENERATION = "generation_config.json"
PRECISIONS: tuple[str, ...] = get_args(get_type_hints(PrecisionConfig)["compute"])
USUAL = 4096  # positions of a slot, of a model that has more


@dataclass(frozen=True)
class Opened:
    """What an engine needs of a model, and what its users do."""

    model: Model
    tokenizer: ChatTokenizer  # of plain text: a special token's text in it is text
    ends: frozenset[int]  # tokens that end a text, or a turn of a conversation
    template: Conversations | None  # None: the model takes no conversations
    name: str
    length: int = USUAL  # positions of a slot unless others are asked for
    longest: int = USUAL  # positions that the model was made for: learned, or as long as what it was trained on
    # of what a chat template has made: special tokens in it are themselves
    marked: ChatTokenizer = field(default_factory=ByteTokenizer)
    without: str = "the model has no chat template."  # why there is no template, where there is none


def open_model(
    path: str | Path,
    *,
    mesh: str | None = None,
    precision: str | None = None,
    step: int | Literal["newest", "best"] = "newest",
    adapter: str | Path | None = None,
    length: int | None = None,
    slots: int = 1,
) -> Opened:
    """Any run directory, step, `adopt import` or Hugging Face directory, on whatever mesh it was trained, to go on with texts.

    `mesh` as "data=2,tensor=2", else the smallest on which the weights and the cache of `slots` x `length` positions fit; `precision`
    computes and holds the weights (by default what the run computed in). ConfigError for what has no weights, no tokenizer, or no text.
    """
    root = Path(path).expanduser()
    _check_there(root, str(path))
    if precision is not None and precision not in PRECISIONS:
        ending = nearest(precision, PRECISIONS) or f"; legal are {', '.join(PRECISIONS)}."
        raise ConfigError(f"the precision {short(repr(precision))} is none to compute in{ending}")
    config = read_config(root, step, precision)
    if FAMILIES[config.model.family].images:
        raise ConfigError(
            f"{short(path)} is a model of images (family {config.model.family}), which has no text to go on with; mt.read_model gives its logits."
        )
    theirs = read_json(root / CONFIG) if is_theirs(root) else beside.found_config(root, config)
    name, files = _tokenizer(root, config)
    tokenizer, marked = load_tokenizer(name), load_tokenizer(name, chat=True)
    vocabulary = config.model.vocab_size
    # of a tokenizer without one the end of a document may be an id more than the model has
    if tokenizer.vocab_size - (tokenizer.end_of_document >= vocabulary) > vocabulary:
        raise ConfigError(
            f"the tokenizer {short(name)} has {tokenizer.vocab_size} ids, but the model's vocabulary is {vocabulary}; it is another model's."
        )
    template, without = _template(config, name, marked)
    asked = [theirs.get("eos_token_id")]
    if GENERATION in files:
        asked.append(read_json(files[GENERATION]).get("eos_token_id"))
    turn = None if template is None else template.end_of_turn()
    ends = {*_ids(asked), tokenizer.end_of_document, *([] if turn is None else [turn])}
    longest = _longest(config, theirs)
    usual = min(longest, USUAL) if length is None else length
    model = on_mesh(root, config, mesh, slots, usual, step=step, adapter=adapter, precision=precision)
    fitting = frozenset(i for i in ends if i < vocabulary)
    return Opened(model, tokenizer, fitting, template, _name(root), usual, longest, marked, without)


def open_asked(options: argparse.Namespace, slots: int, length: int | None) -> Opened:
    """The model that a command line asks for, by the options of `cli.Parser.add_model`."""
    return open_model(
        options.path,
        mesh=options.mesh,
        precision=options.precision,
        step=options.step,
        adapter=options.adapter,
        length=length,
        slots=slots,
    )


def on_mesh(root: Path, config: Config, mesh: str | None, slots: int, length: int, **how: Any) -> Model:
    """The model that `read_config` gave the config of, on the mesh that is asked for, or on the smallest that it fits."""
    if mesh is None:
        # JAX starts as it does for every mesh, with the memory that a run would have
        make_mesh(config)
    chosen = choose(config, mesh, slots, length)
    return read_model(root, mesh=make_mesh(replaced(config, mesh=vars(chosen))), masters=False, **how)


def _check_there(root: Path, given: str) -> None:
    """ConfigError for a path that is none, which for a repository's name of Hugging Face's says what it is."""
    if root.is_dir():
        return
    if os.path.lexists(root):
        raise ConfigError(
            f"{short(given)} is no directory; give a run, one of its checkpoints, or a Hugging Face directory."
        )
    there = [each.name for each in root.parent.iterdir() if each.is_dir()] if root.parent.is_dir() else []
    if near := nearest(root.name, there):
        raise ConfigError(f"there is no directory {short(given)}{near}")
    owner, _, model = given.partition("/")
    if model and "/" not in model and not given.startswith((".", "~")) and not Path(owner).is_dir():
        raise ConfigError(
            f"there is no directory {short(given)}; a repository of Hugging Face's is not downloaded here, so do that first "
            f"(hf download {short(given)} --local-dir {short(model)}) and give {short(model)}."
        )
    raise ConfigError(
        f"there is no directory {short(given)}; give a run, one of its checkpoints, or a Hugging Face directory."
    )


def _tokenizer(root: Path, config: Config) -> tuple[str, Mapping[str, Path]]:
    """What `load_tokenizer` takes, and the files that lie beside it."""
    imported = (beside.run_of(root) / beside.KEPT).is_file()
    if not is_theirs(root) and config.data.tokenizer == "byte" and not imported:
        return "byte", {}
    files = beside.tokenizer_files(root) if is_theirs(root) else beside.found_tokenizer(root, config)
    if "tokenizer.json" in files:
        return str(files["tokenizer.json"]), files
    if files:
        other = next(name for name in beside.VOCABULARIES if name in files)
        raise ConfigError(
            f"beside the weights of {short(root)} is a {other}, but no tokenizer.json, which alone is read here; "
            "transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    if is_theirs(root) or imported:
        raise ConfigError(f"{short(root)} has weights but no tokenizer.json; put that of its model beside them.")
    raise ConfigError(
        f"the run's tokenizer {short(config.data.tokenizer)} is not there any more; put it there again, or a tokenizer.json in "
        f"{short(beside.run_of(root))}."
    )


def _template(config: Config, tokenizer: str, marked: ChatTokenizer) -> tuple[Conversations | None, str]:
    """The chat template, or why there is none."""
    own = config.data.template
    if own is not None and not Path(own).expanduser().is_file():
        own = None
    try:
        return Conversations(find_template(own, tokenizer), marked, time.time()), ""
    except ConfigError as error:
        return None, str(error)


def _ids(given: Iterable[Any]) -> list[int]:
    """The ids in fields that hold one, several or none."""
    return [
        i
        for field in given
        for i in (field if isinstance(field, list) else [field])
        if isinstance(i, int) and not isinstance(i, bool) and i >= 0
    ]


def _longest(config: Config, theirs: Mapping[str, Any]) -> int:
    if FAMILIES[config.model.family].positions == "learned":
        return config.model.max_positions
    told = theirs.get("max_position_embeddings")
    trained = config.train.sequence_length
    return max(trained, told) if isinstance(told, int) else trained


def _name(root: Path) -> str:
    """The run's, of one of its steps too."""
    return beside.run_of(Path(os.path.realpath(root))).name

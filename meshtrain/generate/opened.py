"""A model that is opened to be used: its weights on a mesh, its tokenizer, the tokens that end a text, its chat
template.

    RUN, checkpoints/12, an import, HF_DIR ── config ──► which mesh ── weights ──► Model
                                           ├─ tokenizer.json, or bytes ──► tokenizer ─┬─► ends: what a model says last
                                           ├─ config.json, generation_config.json ────┤
                                           │                          └─► how tokens are drawn unless somebody says
                                           └─ chat_template.jinja ────────────────────┴─► Conversations

The mesh is the one that is asked for, else one device, or as many as weights and cache need: tensor ranks share both;
data ranks have the weights once more, and share the slots.

    on one device      weights / tensor  +  cache of slots / data  +  what is there for a moment

Nothing of the run is locked or written.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import jax

from meshtrain import hub
from meshtrain.adopt import extra_files
from meshtrain.checkpoint.stored import mirrored
from meshtrain.config import Config, MeshConfig, check, replaced
from meshtrain.config.mesh import DATA, TENSOR
from meshtrain.config.schema import PrecisionConfig
from meshtrain.data.boundaries import SOURCES as FILES
from meshtrain.data.boundaries import numbers_of
from meshtrain.data.template import find_template
from meshtrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from meshtrain.errors import ConfigError, listed_divisors, nearest, short
from meshtrain.families import FAMILIES
from meshtrain.generate.drafting import Drafting
from meshtrain.generate.held import KINDS, round_weights
from meshtrain.generate.programs import Decoding
from meshtrain.generate.request import Sampling
from meshtrain.generate.text import Conversations
from meshtrain.hf_families import CONFIG, is_hf_directory, read_json
from meshtrain.hf_families.generation import GENERATION, SAMPLING, problems
from meshtrain.mesh import kind_of, make_mesh
from meshtrain.parallel.placement import all_placed
from meshtrain.plan.rollouts import bytes_remembered
from meshtrain.plan.shapes import itemsize
from meshtrain.reader import Model, read_config, read_model


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes on one device."""

    weights: int
    cache: int
    # The largest weight, twice while it is taken over, or the activations of the longest prompt
    moment: int

    @property
    def all(self) -> int:
        return self.weights + self.cache + self.moment


def memory_needs(config: Config, slots: int, length: int) -> MemoryNeeds:
    """Returns what generating takes on the config's mesh, which has no stages."""
    model = config.model
    mesh = config.mesh
    size = itemsize(config.precision.compute)
    placed = [weight.on_device() * size for weight in all_placed(config)]
    remembered = bytes_remembered(
        config, math.ceil(slots / mesh.data), length, bool(model.mtp)
    )
    cache = int(remembered)
    # the stream and what its branches make of it; logits are of one position
    hidden = model.d_ff + (
        model.moe.top_k * model.expert_width if model.moe.experts else 0
    )
    of_token = 8 * model.d_model + 3 * math.ceil(hidden / mesh.tensor)
    return MemoryNeeds(
        sum(placed),
        cache,
        max(*placed, length * of_token * size + 8 * slots * model.vocab_size),
    )


def choose_mesh(
    config: Config,
    asked: str | None,
    slots: int,
    length: int,
    devices: Sequence[jax.Device] | None = None,
) -> MeshConfig:
    """Returns the mesh for so many slots of `length` positions, of the axes data and tensor.

    `asked` is as "data=2,tensor=2". Else it is one device, and on accelerators whose memory is too small for that the
    smallest tensor that divides the heads and fits. ConfigError for a mesh that cannot be, and where none is large
    enough.
    """
    if asked is not None:
        mesh = parse_mesh(asked)
        check(_placed_on(config, mesh))
        if slots % mesh.data:
            raise ConfigError(
                f"mesh data={mesh.data} does not divide {slots} slots; legal are {listed_divisors(slots)}."
            )
        return mesh
    devices = jax.devices() if devices is None else devices
    if kind_of(devices[0]) == "cpu":
        # fake devices share the host's memory
        return MeshConfig()
    memory = min(
        int((device.memory_stats() or {}).get("bytes_limit", 0)) for device in devices
    )
    if not memory:
        return MeshConfig()
    legal = [t for t in range(1, len(devices) + 1) if config.model.heads % t == 0]
    for tensor in legal:
        need = memory_needs(
            _placed_on(config, MeshConfig(tensor=tensor)), slots, length
        )
        if need.all <= memory:
            return MeshConfig(tensor=tensor)
    gib = [f"{n / 2**30:.1f}" for n in (need.weights, need.cache, need.moment, memory)]
    raise ConfigError(
        f"on tensor {legal[-1]} each device needs {gib[0]} GiB for weights, {gib[1]} for the cache of {slots} x "
        f"{length} positions and "
        f"{gib[2]} besides, and has {gib[3]}; give fewer slots, shorter ones, or more devices."
    )


def _placed_on(config: Config, mesh: MeshConfig) -> Config:
    replicated = {"zero_stage": 0, "sequence_parallel": False, "vocab": "spread"}
    return replaced(
        config, mesh=vars(mesh), parallel=replicated, train={"uneven_batch": "pad"}
    )


def parse_mesh(asked: str) -> MeshConfig:
    """Returns the mesh of a text as "data=2,tensor=2"."""
    return MeshConfig.read(asked, (DATA, TENSOR), ": a model generates without stages.")


PRECISIONS: tuple[str, ...] = get_args(get_type_hints(PrecisionConfig)["compute"])
# What else that file may ask for and nothing here does, with the value that asks for nothing.
ABSENT: Mapping[str, Any] = {
    "repetition_penalty": 1,
    "min_p": 0,
    "typical_p": 1,
    "no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
USUAL = 4096  # positions of a slot, of a model that has more


@dataclass(frozen=True)
class Opened:
    """A model with all that an engine and its users need of it."""

    model: Model
    tokenizer: Tokenizer  # of plain text: a special token's text in it is text
    ends: frozenset[int]  # tokens that end a text, or a turn of a conversation
    template: Conversations | None  # None: the model takes no conversations
    name: str
    length: int = USUAL  # positions of a slot unless others are asked for
    # Positions that the model was made for: learned, or as long as what it was trained on
    longest: int = USUAL
    # of what a chat template has made: special tokens in it are themselves
    marked: Tokenizer = field(default_factory=ByteTokenizer)
    # Why there is no template, where there is none
    without: str = "the model has no chat template."
    # How its makers have tokens chosen; None: they do not say
    sampling: Sampling | None = None
    asks: tuple[str, ...] = ()  # what there is to say of how they have it, sentences
    # what holds them, see `generate.held`; None: the dtype that computes
    weights: str | None = None
    drafts: bool = False  # see `generate.drafting`

    @property
    def decoding(self) -> Callable[..., Decoding]:
        """Makes the device's programs."""
        return partial(Drafting if self.drafts else Decoding, kind=self.weights)


def open_model(
    path: str | Path,
    *,
    mesh: str | None = None,
    precision: str | None = None,
    step: int | Literal["newest", "best"] = "newest",
    adapter: str | Path | None = None,
    length: int | None = None,
    slots: int = 1,
    weights: str | None = None,
) -> Opened:
    """Opens any run directory, step, `adopt import` or Hugging Face directory, on whatever mesh it was trained, to go
    on with texts.

    `mesh` as "data=2,tensor=2", else the smallest on which the weights and the cache of `slots` x `length` positions
    fit; `precision` computes and holds the weights (by default what the run computed in), but for those that `weights`
    (float8, int8) holds. ConfigError for what has no weights, no tokenizer, or no text.
    """
    given = str(path)
    root = mirrored(path)
    _check_there(root, given)
    _check_kinds(precision, weights)
    config = read_config(root, step, precision)
    if FAMILIES[config.model.family].images:
        raise ConfigError(
            f"{short(path)} is a model of images (family {config.model.family}), which has no text to go on with; "
            "mt.read_model gives its logits."
        )
    theirs = (
        read_json(root / CONFIG)
        if is_hf_directory(root)
        else extra_files.find_hf_config(root, config)
    )
    name, files = _tokenizer(root, config)
    begin = config.data.begin
    end = config.data.end
    tokenizer = load_tokenizer(name, begin=begin, end=end)
    marked = load_tokenizer(name, chat=True, begin=begin, end=end)
    vocabulary = config.model.vocab_size
    _check_vocabulary(tokenizer, name, vocabulary)
    template, without = _conversations(config.data.template, name, marked)
    generation = read_json(files[GENERATION]) if GENERATION in files else {}
    sampling, asks = _sampling(generation)
    ends = _ends(tokenizer, template, {CONFIG: theirs, GENERATION: generation})
    boundaries = (f"{note}." for note in tokenizer.boundaries.notes)
    asks = (*asks, *boundaries, *_left_out(ends, vocabulary))
    longest = _longest(config, theirs)
    usual = min(longest, USUAL) if length is None else length
    model = place_model(
        root,
        config,
        mesh,
        slots,
        usual,
        weights,
        step=step,
        adapter=adapter,
        precision=precision,
    )
    return Opened(
        model,
        tokenizer,
        frozenset(i for i in ends if i < vocabulary),
        template,
        Path(
            hub.repository_of(root) or extra_files.run_of(Path(os.path.realpath(root)))
        ).name,
        usual,
        longest,
        marked,
        without,
        sampling,
        asks,
        weights,
    )


def _check_kinds(precision: str | None, weights: str | None) -> None:
    for asked, legal, before, after in (
        (precision, PRECISIONS, "the precision ", " is none to compute in"),
        (weights, KINDS, "weights are not held in ", " here"),
    ):
        if asked is not None and asked not in legal:
            ending = nearest(asked, legal) or f"; legal are {', '.join(legal)}."
            raise ConfigError(f"{before}{short(repr(asked))}{after}{ending}")


def _check_vocabulary(tokenizer: Tokenizer, name: str, vocabulary: int) -> None:
    # of a tokenizer without one the end of a document may be an id more than the model has
    if tokenizer.vocab_size - (tokenizer.end_of_document >= vocabulary) > vocabulary:
        raise ConfigError(
            f"the tokenizer {short(name)} has {tokenizer.vocab_size} ids, but the model's vocabulary is {vocabulary}; "
            "it is another model's."
        )


def _ends(
    tokenizer: Tokenizer,
    template: Conversations | None,
    files: Mapping[str, Mapping[str, Any]],
) -> dict[int, str]:
    """Returns the tokens that end a text or a turn, each with the file that says so."""
    ends = {stop.id: stop.source for stop in tokenizer.boundaries.stops}
    if template and (turn := template.end_of_turn()) is not None:
        ends[turn] = "the chat template"
    # of weights whose tokenizer lies elsewhere
    for file, content in files.items():
        ends |= {
            i: file for i in numbers_of(content.get("eos_token_id")) if i not in ends
        }
    return ends


def _left_out(ends: Mapping[int, str], vocabulary: int) -> Iterator[str]:
    """Yields a sentence on the end tokens of a file that the model does not have."""
    beyond = [
        f"{i} of {source}"
        for i, source in ends.items()
        if i >= vocabulary and source in FILES
    ]
    if beyond:
        yield f"eos_token_id {', '.join(beyond)} is left out: the model's tokens are 0 to {vocabulary - 1}."


def _conversations(
    own: str | None, name: str, marked: Tokenizer
) -> tuple[Conversations | None, str]:
    """Returns the model's chat template, or why it has none."""
    try:
        source = find_template(
            own if own and Path(own).expanduser().is_file() else None, name
        )
        return Conversations(source, marked, time.time()), ""
    except ConfigError as error:
        return None, str(error)


def open_asked(options: argparse.Namespace, slots: int, length: int | None) -> Opened:
    """Opens the model that a command line asks for, by the options of `cli.Parser.add_model`."""
    how = {
        name: getattr(options, name)
        for name in ("mesh", "precision", "step", "adapter", "weights")
    }
    opened = open_model(options.path, length=length, slots=slots, **how)
    return replace(opened, drafts=getattr(options, "draft", False))


def place_model(
    root: Path,
    config: Config,
    mesh: str | None,
    slots: int,
    length: int,
    weights: str | None,
    **how: Any,
) -> Model:
    """Returns the model that `read_config` gave the config of, on the mesh that is asked for, or on the smallest that
    it fits.

    `weights`: what they are rounded to, see `generate.held`.
    """
    if mesh is None:
        # JAX starts as it does for every mesh, with the memory that a run would have
        make_mesh(config)
    chosen = choose_mesh(config, mesh, slots, length)
    model = read_model(
        root, mesh=make_mesh(replaced(config, mesh=vars(chosen))), masters=False, **how
    )
    if weights is not None:
        round_weights(model, weights)
    return model


def _check_there(root: Path, given: str) -> None:
    if root.is_dir():
        return
    legal = "give a run, one of its checkpoints, or a Hugging Face directory."
    if os.path.lexists(root):
        raise ConfigError(f"{short(given)} is not a directory; {legal}")
    there = (
        [each.name for each in root.parent.iterdir() if each.is_dir()]
        if root.parent.is_dir()
        else []
    )
    if near := nearest(root.name, there):
        raise ConfigError(f"there is no directory {short(given)}{near}")
    raise ConfigError(f"there is no directory {short(given)}; {legal}")


def _tokenizer(root: Path, config: Config) -> tuple[str, Mapping[str, Path]]:
    """Returns what `load_tokenizer` takes, and the files that lie beside it."""
    imported = (extra_files.run_of(root) / extra_files.HF_CONFIG).is_file()
    if not is_hf_directory(root) and config.data.tokenizer == "byte" and not imported:
        return "byte", {}
    files = (
        extra_files.tokenizer_files(root)
        if is_hf_directory(root)
        else extra_files.find_tokenizer(root, config)
    )
    if "tokenizer.json" in files:
        return str(files["tokenizer.json"]), files
    if files:
        other = next(name for name in extra_files.VOCABULARIES if name in files)
        raise ConfigError(
            f"beside the weights of {short(root)} is a {other}, but no tokenizer.json, which alone is read here; "
            "transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        )
    if is_hf_directory(root) or imported:
        raise ConfigError(
            f"{short(root)} has weights but no tokenizer.json; put that of its model beside them."
        )
    raise ConfigError(
        f"the run's tokenizer {short(config.data.tokenizer)} is not there any more; put it there again, or a "
        "tokenizer.json in "
        f"{short(extra_files.run_of(root))}."
    )


def _sampling(generation: Mapping[str, Any]) -> tuple[Sampling | None, tuple[str, ...]]:
    """Returns the sampling of a generation_config.json, and sentences about it; ConfigError if it is invalid."""
    if (problem := next(problems(generation, SAMPLING), None)) is not None:
        raise ConfigError(problem)
    absent = [
        name
        for name, neutral in ABSENT.items()
        if generation.get(name) not in (None, neutral)
    ]
    asks = (
        [
            f"{GENERATION} asks for {', '.join(absent)}, which is not built here and left out."
        ]
        if absent
        else []
    )
    values = {
        name: generation[name]
        for name in ("temperature", "top_k", "top_p")
        if generation.get(name) is not None
    }
    draws = generation.get("do_sample")
    if draws is None and not values:
        return None, tuple(asks)
    if draws is False:
        return Sampling(), tuple(asks)
    sampling = Sampling(**{"temperature": 1.0, **values})
    how = (
        ", ".join(f"{name} {value:g}" for name, value in values.items())
        or "temperature 1"
    )
    asks.insert(
        0, f"unless asked otherwise, tokens are drawn as {GENERATION} says: {how}."
    )
    return sampling, tuple(asks)


def _longest(config: Config, theirs: Mapping[str, Any]) -> int:
    if FAMILIES[config.model.family].positions == "learned":
        return config.model.max_positions
    stated = theirs.get("max_position_embeddings")
    trained = config.train.sequence_length
    return max(trained, stated) if isinstance(stated, int) else trained

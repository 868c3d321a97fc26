"""From a run directory to a function of tokens, or of patches: the weights of a checkpoint alone, on any mesh, without
writing or waiting.

    12/ ── verified against its digests ──► weights on this mesh ── still the same 12/? ──► model(tokens [B, T])
                                                                     no: retention has removed it; the newest one now

No lock is taken, nothing is written, and no optimizer state is read or allocated. So it works on a directory that may
only be read, and beside a run that goes on. A directory of Hugging Face's (config.json, safetensors) is read likewise.
"""

import warnings
from collections.abc import Container, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from meshtrain import hub
from meshtrain.checkpoint import restoring, steps
from meshtrain.checkpoint.arrays import freed_blocks_returned
from meshtrain.checkpoint.finding import no_best, problems, rank_by_eval_loss
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.manifest import StepManifest
from meshtrain.checkpoint.restoring import read_weights
from meshtrain.checkpoint.steps import MANIFEST
from meshtrain.checkpoint.stored import mirrored
from meshtrain.config import Config, ModelConfig, check, load, replaced
from meshtrain.config.imports import take
from meshtrain.config.key import known
from meshtrain.config.mesh import MeshConfig
from meshtrain.data.copies import opened_from
from meshtrain.errors import ConfigError, short
from meshtrain.families import FAMILIES
from meshtrain.files import retried
from meshtrain.hf import loading
from meshtrain.hf.hf_directory import config_of
from meshtrain.hf.peft import Adapters, with_adapters
from meshtrain.hf_families import is_hf_directory
from meshtrain.inputs import (
    PATCHES,
    TOKENS,
    a_batch,
    inputs,
    pad_rows,
    some_ids,
    some_patches,
)
from meshtrain.mesh import check_axes, make_mesh
from meshtrain.model.hooks import AttentionHook, BlockHook, LossHook
from meshtrain.registry import Shown
from meshtrain.run.processes import first_decides, gathered
from meshtrain.step import Program

TRIES = 5  # steps that retention may take away under a reader, one after the other


class Model(Shown):
    """The model of one checkpoint: `model(tokens)`, or `model(patches)` of images, gives logits.

    `config` is the run's, with this mesh in place of its own.
    """

    def __init__(
        self,
        program: Program,
        params: Any,
        step: int,
        directory: Path,
    ) -> None:
        self.program = program
        self.params = params
        self.config: Config = program.config
        self.step = step
        self.directory = directory

    def __call__(self, values: ArrayLike) -> jax.Array:
        """Returns logits [B, T, vocab_size], float32, of token ids [B, T]; compiled once for each shape.

        A model of images returns logits [B, classes] of patches [B, N, P]. ConfigError for other arrays.
        """
        if self.program.of_images:
            patches = some_patches(values, self.config.model)
            return self.program.logits(
                self.params, self._placed({PATCHES: patches})[PATCHES]
            )[: len(patches), 0]
        ids = some_ids(TOKENS, values, self.config.model.vocab_size)
        check_learned(self.config.model, ids.shape[1])
        return self.program.logits(self.params, self._placed({TOKENS: ids})[TOKENS])[
            : len(ids)
        ]

    def loss(self, batch: Mapping[str, ArrayLike]) -> float:
        """Returns the mean loss per token (of images per image) of a batch as `mt.open_data` gives them: int tokens and
        labels [B, T], and where there are any positions, segments and float weights of the loss (absent: all ones).

        The loss is the one that `read_model` was given, else as the run's config has it. ConfigError for a batch that
        is none.
        """
        arrays = a_batch(batch, self.config)
        if not self.program.of_images:
            positions = arrays.get("positions")
            length = (
                arrays[TOKENS].shape[1]
                if positions is None
                else int(positions.max()) + 1
            )
            check_learned(self.config.model, length)
        if (order := self.program.column_order(inputs(arrays).shape[1])) is not None:
            arrays = {name: array[:, order] for name, array in arrays.items()}
        return float(self.program.eval_step(self.params, self._placed(arrays)))

    @cached_property
    def weights(self) -> dict[str, jax.Array]:
        """The float32 weights by canonical name (blocks.attention.q: all layers in order along the first axis), whole,
        unpadded.
        """
        whole = lambda params: jax.tree.map(
            lambda x: x.astype(jnp.float32), self.program.layout.canonical(params)
        )
        canonical = jax.jit(whole)(self.params)
        return {
            leaf.name: x
            for leaf, x in zip(
                self.program.layout.flat, jax.tree.leaves(canonical), strict=True
            )
        }

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns the batch on the mesh, with as many padding rows as its data axis needs."""
        missing = -len(inputs(batch)) % self.config.mesh.data
        padded = pad_rows(batch, missing) if missing else batch
        return {
            name: jax.device_put(array, self.program.batch_sharding)
            for name, array in padded.items()
        }


def check_learned(model: ModelConfig, length: int) -> None:
    """Raises ConfigError for more positions than the model has learned."""
    if FAMILIES[model.family].positions == "learned" and length > model.max_positions:
        raise ConfigError(
            f"{length} positions are asked for, but the model has learned {model.max_positions}."
        )


def read_model(
    path: str | Path,
    step: int | Literal["newest", "best"] = "newest",
    mesh: Mesh | None = None,
    *,
    adapter: str | Path | None = None,
    block: BlockHook | None = None,
    attention: AttentionHook | None = None,
    loss: LossHook | None = None,
    masters: bool = True,
    precision: str | None = None,
) -> Model:
    """Returns the model of a run directory, of its checkpoints/ or of one step, or of a Hugging Face directory, on
    `mesh` (default: the first device); of the last also with an `adapter`, a directory of PEFT's.

    The weights are verified as a resume does: with "newest", and "best" (the lowest eval loss), a damaged step is
    passed over with a warning. A model that was trained with a block or attention of its own must be read with them.
    `precision` is the dtype that computes, by default the config's; with `masters` False weights are held in it too.
    ConfigError if there is no such step, if all there is is damaged, or if the mesh does not fit the model. With
    several processes all of them call it alike.
    """
    root, theirs = _root_of(path)
    # before anything asks for the process's number, which starts JAX
    mesh = make_mesh(load({})) if mesh is None else mesh
    check_axes(mesh)
    how = {"block": block, "attention": attention, "loss": loss, "masters": masters}
    if theirs:
        return _adopted(root, mesh, adapter, precision, **how)
    if adapter is not None:
        raise ConfigError(
            f"adapter is given, but {short(root)} is not a Hugging Face directory; meshtrain adopt merge adds them."
        )
    damaged: dict[Path, str] = {}
    removed: list[Path] = []
    while len(removed) < TRIES:
        directory = _choose(root, step, damaged, removed)
        before = _identity(directory)
        damage: list[str] = []
        model = error = None
        try:
            damage = problems(directory)
            model = None if damage else _model(directory, mesh, precision, **how)
        except Exception as raised:
            error = raised
        # A step that is removed is renamed first: under its own name it was whole all the while, for every process.
        if not all(gathered(_identity(directory) == before)):
            removed.append(directory)
        elif error is not None:
            raise error
        elif model is None:
            damaged[directory] = (
                f"checkpoint {directory} is damaged: {'; '.join(damage)}"
            )
        else:
            for sentence in damaged.values():
                warnings.warn(f"{sentence}; it is passed over.", stacklevel=2)
            return model
    raise ConfigError(
        f"{TRIES} checkpoints in {root} were removed while they were read, one after the other; "
        "a larger checkpoint.keep leaves them longer."
    )


def _root_of(path: str | Path) -> tuple[Path, bool]:
    """Returns the absolute path, and whether a Hugging Face directory lies there; ConfigError if it is not a path."""
    try:
        root = mirrored(path).absolute()
        return root, is_hf_directory(root)
    except (TypeError, OSError):
        raise ConfigError(
            f"{short(repr(path))} is not a path that a run or a Hugging Face directory can have."
        ) from None


def read_config(
    path: str | Path,
    step: int | Literal["newest", "best"] = "newest",
    precision: str | None = None,
) -> Config:
    """Returns the config of the model that `read_model` would read, on one device; ConfigError if there is none.

    Nothing is verified.
    """
    root = mirrored(path).absolute()
    one = MeshConfig().shape
    if is_hf_directory(root):
        return _set_precision(replaced(config_of(root), mesh=one), precision)
    directory = _choose(root, step, {}, [])
    return _config(directory, StepManifest.read(directory), one, precision)


def _adopted(
    root: Path,
    mesh: Mesh,
    adapter: str | Path | None,
    precision: str | None,
    **how: Any,
) -> Model:
    """Returns the model of a Hugging Face directory, with the adapters of a directory of PEFT's."""
    config = _set_precision(replaced(config_of(root), mesh=mesh.shape), precision)
    adapters = (
        None if adapter is None else Adapters(hub.directory(adapter), config.model)
    )
    config = with_adapters(config, adapters)
    check(config)
    program = Program(config, mesh, **how)
    with freed_blocks_returned():
        params = loading.read(program.layout, root, adapters=adapters)
    return Model(program, params, 0, root)


def _choose(
    root: Path, step: int | str, damaged: Mapping[Path, str], removed: Container[Path]
) -> Path:
    """Returns the directory of a step; of "newest" and "best" those that are known to be damaged are left out.

    ConfigError if there is none.
    """
    there = {
        d.name: d
        for d in map(
            Path, first_decides(lambda: [str(d) for d in steps.directories(root)])
        )
    }
    if not there:
        raise ConfigError(
            f"there is no checkpoint in {short(root)}; give a run directory that has one, or one step."
        )
    left = [d for d in there.values() if d not in damaged]
    if step in ("newest", "best") and not left:
        newest = list(there.values())[-1]
        raise ConfigError(
            f"every checkpoint in {root} is damaged ({damaged[newest]}); give another."
        )
    if step == "newest":
        return left[-1]
    if step == "best":
        evaluated = list(
            map(Path, first_decides(lambda: [str(d) for d in rank_by_eval_loss(root)]))
        )
        if best := [d for d in evaluated if d in left]:
            return best[0]
        raise ConfigError(no_best(root, evaluated))
    wanted = there.get(str(step))
    if wanted is None or wanted in removed:
        what = (
            "there is no"
            if wanted is None and not removed
            else "the run has removed, while it was read,"
        )
        raise ConfigError(f"{what} step {step} in {root}; it has {', '.join(there)}.")
    if wanted in damaged:
        raise ConfigError(f"{damaged[wanted]}.")
    return wanted


def _identity(directory: Path) -> tuple[int, int, int] | None:
    """Returns by what this step differs from a later one of the same name; None if it is not there."""
    try:
        marker = retried((directory / steps.COMMIT).stat)
    except OSError:
        return None
    return marker.st_dev, marker.st_ino, marker.st_mtime_ns


def _model(directory: Path, mesh: Mesh, precision: str | None, **how: Any) -> Model:
    manifest = StepManifest.read(directory)
    program = Program(_config(directory, manifest, mesh.shape, precision), mesh, **how)
    restoring.compare_hooks(
        manifest.hooks,
        program.hooks.names,
        f"checkpoint {directory}",
        weights_only=True,
    )
    with freed_blocks_returned():
        params = read_weights(GlobalArrays(program), directory, manifest)
    return Model(program, params, manifest.step, directory)


def _config(
    directory: Path,
    manifest: StepManifest,
    mesh: Mapping[str, int],
    precision: str | None,
) -> Config:
    """Returns the config of a run's checkpoint, without keys that this version does not know, on another mesh and with
    nothing else in `parallel`.
    """
    sections = known(manifest.config, Config)
    run_directory = directory.absolute().parents[1]
    if entries := sections.get("run", {}).get("imports"):
        sections["run"]["imports"] = take(entries, directory / MANIFEST, run_directory)
    sections["data"] = opened_from(sections.get("data", {}), run_directory)
    run = load(
        {
            name: values
            for name, values in sections.items()
            if name not in ("mesh", "parallel")
        }
    )
    # A mesh need not divide the run's batch to read its model. Weights stay whole on every data rank: gathering them
    # for each call would cost more than it saves.
    config = replaced(
        run,
        mesh=vars(MeshConfig.make(mesh)),
        parallel={"zero_stage": 0},
        train={"uneven_batch": "pad"},
        precision={"float8_frozen": False},
    )
    config = _set_precision(config, precision)
    check(config)
    return config


def _set_precision(config: Config, precision: str | None) -> Config:
    if precision is None:
        return config
    return replaced(config, precision={"compute": precision})

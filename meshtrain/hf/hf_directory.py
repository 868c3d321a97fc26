"""A Hugging Face directory: its config, its tensors (of which boxes are read, never a whole model), and how pixels are
prepared.

    config.json                     the section `model` (`meshtrain.hf_families`)
    model.safetensors.index.json    {"weight_map": {name: file}}           only files of this directory are opened
    model-00001-of-00002.safetensors                                       mapped into memory, and read where asked for
    preprocessor_config.json        ours, data.images
      image_mean, image_std, do_normalize         mean, std
      size {height, width}, or a number           resize stretch
      size {shortest_edge}, do_center_crop        resize crop

Pickles (.bin, .pt) run code when they are opened, so they are refused. Pixels are from 0 to 1 before the mean is taken,
here and there (rescale_factor 1 / 255). No JAX.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config import Config, load
from meshtrain.config.follow import put
from meshtrain.errors import ConfigError, not_installed, short
from meshtrain.families import FAMILIES
from meshtrain.files import check_regular
from meshtrain.hf import fp8, mxfp4
from meshtrain.hf_families import BY_MODEL_TYPE, CONFIG, is_hf_directory, read_json

Json = dict[str, Any]
ENDING = ".safetensors"
SINGLE = f"model{ENDING}"
INDEX = f"model{ENDING}.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
HEADS = ("lm_head.", "classifier.")  # of the classes with a head, under no prefix
PREPROCESSOR = "preprocessor_config.json"
BILINEAR = 2  # Pillow's number of how images are resized here


class TensorFiles:
    """The tensors of a directory by name, in files that begin with `stem`.

    ConfigError, in a sentence, for what is missing, damaged, or outside of it.
    """

    def __init__(
        self,
        directory: Path,
        stem: str = "model",
        rename: Callable[[str], str] | None = None,
    ) -> None:
        """`rename`: of the names in the files, what they are called here; of weights without it as their class with a
        head has them.
        """
        self.directory = directory
        self._open: dict[str, Any] = {}
        self._file: dict[str, str] = {}
        single = f"{stem}{ENDING}"
        self._index = f"{single}.index.json"
        if (directory / self._index).is_file():
            self._read_index(read_json(directory / self._index))
        elif (directory / single).is_file():
            self._file = dict.fromkeys(self._opened(single).keys(), single)
        else:
            pickles = sorted(
                p.name
                for p in directory.glob("*")
                if p.suffix in (".bin", ".pt", ".pth", ".ckpt")
            )
            runs_code = (
                "is a pickle, which runs code when it is opened: save it as safetensors"
            )
            why = f"; {short(pickles[0])} {runs_code}" if pickles else ""
            raise ConfigError(
                f"{short(directory)} has neither {single} nor {self._index}{why}."
            )
        self._theirs: dict[str, str] = {}  # names in the files, by ours
        self._rename(rename or _prefixer(directory, self._file))
        self._mxfp4 = frozenset(
            name
            for name in (
                name.removesuffix(mxfp4.BLOCKS)
                for name in self._file
                if name.endswith(mxfp4.BLOCKS)
            )
            if f"{name}{mxfp4.SCALES}" in self._file
        )

    def _rename(self, rename: Callable[[str], str]) -> None:
        for name in self._file:
            other = self._theirs.setdefault(rename(name), name)
            if other != name:
                raise ConfigError(
                    f"{short(self.directory)} has both {short(other)} and {short(name)}, which are one tensor; leave "
                    "one out."
                )
        self._file = {ours: self._file[theirs] for ours, theirs in self._theirs.items()}

    @property
    def names(self) -> list[str]:
        """Their names; of what is in MXFP4 that of the matrices, in the place of its two tensors; no scales of what is
        in float8.
        """
        parts = {
            f"{name}{end}"
            for name in self._mxfp4
            for end in (mxfp4.BLOCKS, mxfp4.SCALES)
        }
        parts |= {f"{name}{fp8.SCALES}" for name in self._file}
        return [
            *(name for name in self._file if name not in parts),
            *sorted(self._mxfp4),
        ]

    def metadata(self) -> dict[str, str]:
        """Returns the metadata of the first file."""
        if self._file:
            return dict(self._opened(min(self._file.values())).metadata() or {})
        return {}

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._mxfp4:
            return mxfp4.shape(self.shape(f"{name}{mxfp4.BLOCKS}"))
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the name that safetensors has: F32, BF16 ...; of MXFP4 that of the narrowest dtype which holds it
        exactly, of float8 with scales that of what its models are kept in.
        """
        if name in self._mxfp4 or self._is_scaled(name):
            return "BF16"
        return str(self._slice(name).get_dtype())

    def _is_scaled(self, name: str) -> bool:
        return f"{name}{fp8.SCALES}" in self._file

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """Returns a box of a tensor, in its own dtype."""
        if name in self._mxfp4:
            return mxfp4.read(self.read, name, box)
        try:
            if self._is_scaled(name):
                path = self.directory / self._file[name]
                numbers = fp8.read_bytes(path, self._theirs[name], box)
                return fp8.read(numbers, self.read, name, box)
            return self._slice(name)[box]
        except Exception as error:
            where = short(self.directory / self._file[name])
            raise ConfigError(
                f"{name} cannot be read from {where}: {short(str(error))}."
            ) from None

    def tensor(self, name: str) -> np.ndarray:
        return self.read(name, tuple(slice(0, n) for n in self.shape(name)))

    def _read_index(self, index: Json) -> None:
        where = self.directory / self._index
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(file, str) for file in names.values()
        ):
            raise ConfigError(f"{short(where)} has no weight_map of names and files.")
        present = {path.name for path in self.directory.iterdir()}
        for file in sorted(set(names.values())):
            # an index may come from anybody
            if Path(file).name != file or file in ("", ".", ".."):
                raise ConfigError(
                    f"{short(where)} names {short(repr(file))}, which is not a file of its directory."
                )
            if file not in present:
                raise ConfigError(
                    f"{short(where)} names {short(file)}, which is not there."
                )
            tensors = set(self._opened(file).keys())
            if missing := [
                name for name, of in names.items() if of == file and name not in tensors
            ]:
                raise ConfigError(
                    f"{short(where)} has {short(missing[0])} in {short(file)}, but it is not in there."
                )
        self._file = dict(names)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            try:
                import ml_dtypes  # noqa: F401  (numpy's bfloat16)
                from safetensors import SafetensorError, safe_open
            except ImportError:
                raise not_installed(
                    "weights of Hugging Face need safetensors", "adopt"
                ) from None
            path = self.directory / file
            try:
                check_regular(path)
                self._open[file] = safe_open(str(path), framework="np")
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{short(path)} is not a complete safetensors file: {short(str(error))}."
                ) from None
        return self._open[file]

    def _slice(self, name: str) -> Any:
        if name not in self._file:
            raise ConfigError(f"{short(self.directory)} has no tensor {short(name)}.")
        return self._opened(self._file[name]).get_slice(self._theirs[name])


def _prefixer(directory: Path, names: Iterable[str]) -> Callable[[str], str]:
    """Returns a function that puts before a name what the class with a head has before it, where the files are of the
    class without.
    """
    path = directory / CONFIG
    family = (
        BY_MODEL_TYPE.get(str(read_json(path).get("model_type")))
        if path.is_file()
        else None
    )
    if family is None or any(name.startswith(family.prefix) for name in names):
        return lambda name: name
    return lambda name: name if name.startswith(HEADS) else family.prefix + name


def config_of(
    directory: Path, source: Path | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Returns the config of a directory's model: its section `model`, the rest as `source` and `overrides` have it.

    Without a source, sequences are short, and pixels are prepared as the directory says.
    """
    if not is_hf_directory(directory):
        raise ConfigError(
            f"{short(directory)} has no config.json; give a Hugging Face directory."
        )
    given = read_json(directory / CONFIG)
    train: Json = {"uneven_batch": "pad"}
    sections: Json = {"parallel": {"zero_stage": 0}, "train": train}
    family = BY_MODEL_TYPE.get(str(given.get("model_type")))
    if family is not None and FAMILIES[family.name].images:
        sections["data"] = {"source": "synthetic", "images": images_section(directory)}
    else:
        longest = given.get("max_position_embeddings") or given.get("n_positions")
        train["sequence_length"] = (
            min(longest, 256) if isinstance(longest, int) and longest > 0 else 256
        )
    config = load(source or sections, [*overrides, f"model.weights={directory}"])
    # the directory need not be there later
    return put(config, model={"weights": None})


def images_section(directory: Path) -> Json:
    """Returns the section data.images that a directory asks for, {} without a preprocessor_config.json; ConfigError for
    what is not computed here.
    """
    path = directory / PREPROCESSOR
    if not path.is_file():
        return {}
    given = read_json(path)
    scale = given.get("rescale_factor", 1 / 255)
    if (
        given.get("do_rescale") is False
        or not isinstance(scale, float)
        or not math.isclose(scale, 1 / 255)
    ):
        why = "pixels that are not from 0 to 1 are not computed here"
        raise ConfigError(f"{short(path)}: {why}; rescale_factor must be 1 / 255.")
    size = given.get("size")
    section: Json = {
        "resize": "crop"
        if isinstance(size, dict) and "shortest_edge" in size
        else "stretch"
    }
    if given.get("do_normalize") is False:
        return section | {"mean": [0.0], "std": [1.0]}
    for name in ("mean", "std"):
        if (values := given.get(f"image_{name}")) is not None:
            section[name] = values if isinstance(values, list) else [values]
    return section


def preprocessor_json(config: Config) -> str:
    """Returns the preprocessor_config.json of a resolved config's images."""
    images = config.data.images
    model = config.model
    fields: Json = {
        "image_processor_type": "ViTImageProcessor",
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_resize": True,
        "resample": BILINEAR,
    }
    for name in ("mean", "std"):
        channels = list(getattr(images, name) or (0.5,))
        fields[f"image_{name}"] = channels * (model.channels // len(channels))
    square = {"height": model.image_size, "width": model.image_size}
    if images.resize == "crop":
        fields |= {
            "do_center_crop": True,
            "crop_size": square,
            "size": {"shortest_edge": model.image_size},
        }
    else:
        fields["size"] = square
    return json.dumps(fields, indent=2) + "\n"

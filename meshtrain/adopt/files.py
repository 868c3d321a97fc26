"""The weights of a Hugging Face directory: safetensors, one file or many with an index, of which boxes are read and never a whole model.

    model.safetensors.index.json    {"weight_map": {name: file}}         only files of this directory are opened
    model-00001-of-00002.safetensors                                      mapped into memory: what is not asked for is not read

Pickles (.bin, .pt) run code when they are opened, so they are refused.
"""

from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.config.theirs import read_json
from meshtrain.errors import ConfigError, short

ENDING = ".safetensors"
SINGLE, INDEX = f"model{ENDING}", f"model{ENDING}.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")


class Files:
    """The tensors of a directory by name, in files that begin with `stem`.

    ConfigError, in a sentence, for what is missing, damaged, or outside of it.
    """

    def __init__(self, directory: Path, stem: str = "model") -> None:
        self.directory = directory
        self._open: dict[str, Any] = {}
        self._file: dict[str, str] = {}
        single = f"{stem}{ENDING}"
        self._index = f"{single}.index.json"
        if (directory / self._index).is_file():
            self._from_index(read_json(directory / self._index))
        elif (directory / single).is_file():
            self._file = dict.fromkeys(self._opened(single).keys(), single)
        else:
            pickles = sorted(
                path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
            )
            why = (
                f"; {short(pickles[0])} is a pickle, which runs code when it is opened: save it as safetensors"
                if pickles
                else ""
            )
            raise ConfigError(f"{short(directory)} has neither {single} nor {self._index}{why}.")

    @property
    def names(self) -> list[str]:
        return list(self._file)

    def metadata(self) -> dict[str, str]:
        """What the first file says of itself."""
        return dict(self._opened(min(self._file.values())).metadata() or {}) if self._file else {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors has it: F32, BF16 ..."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, box: tuple[slice, ...]) -> np.ndarray:
        """A box of a tensor, in its own dtype."""
        try:
            return self._slice(name)[box]
        except Exception as error:
            raise ConfigError(f"{name} cannot be read from {self._where(name)}: {short(str(error))}.") from None

    def whole(self, name: str) -> np.ndarray:
        """All of a tensor."""
        return self.read(name, tuple(slice(0, n) for n in self.shape(name)))

    def _from_index(self, index: dict[str, Any]) -> None:
        where = self.directory / self._index
        names = index.get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ConfigError(f"{short(where)} has no weight_map of names and files.")
        for file in sorted(set(names.values())):
            # an index may come from anybody
            if Path(file).name != file or file in ("", ".", ".."):
                raise ConfigError(f"{short(where)} names {short(repr(file))}, which is no file of its directory.")
            if not (self.directory / file).is_file():
                raise ConfigError(f"{short(where)} names {short(file)}, which is not there.")
            held = set(self._opened(file).keys())
            if missing := [name for name, of in names.items() if of == file and name not in held]:
                raise ConfigError(f"{short(where)} has {short(missing[0])} in {short(file)}, but it is not in there.")
        self._file = dict(names)

    def _opened(self, file: str) -> Any:
        if file not in self._open:
            # only who adopts weights needs it
            try:
                import ml_dtypes  # noqa: F401  (numpy's bfloat16)
                from safetensors import SafetensorError, safe_open
            except ImportError:
                raise ConfigError("weights of Hugging Face need safetensors: pip install 'meshtrain[adopt]'.") from None
            path = self.directory / file
            try:
                self._open[file] = safe_open(str(path), framework="np")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{short(path)} is no whole safetensors file: {short(str(error))}.") from None
        return self._open[file]

    def _where(self, name: str) -> str:
        return short(self.directory / self._file[name])

    def _slice(self, name: str) -> Any:
        if name not in self._file:
            raise ConfigError(f"{short(self.directory)} has no tensor {short(name)}.")
        return self._opened(self._file[name]).get_slice(name)

"""Builds the API reference: python -m experiments.api_reference DIR

As `python -m pdoc meshtrain -o DIR`, but of every module: pdoc takes those for private that a package's __all__ does
not name.
"""

import importlib
import pkgutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render


def modules(package: ModuleType) -> list[ModuleType]:
    """A package and all modules below it but the commands (`__main__`), which pdoc leaves out too."""
    found = [package]
    for entry in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not entry.name.endswith(".__main__"):
            module = importlib.import_module(entry.name)
            found += modules(module) if entry.ispkg else [module]
    return found


def build(directory: Path, sources: bool = True) -> list[str]:
    """Writes a page a module, with its source unless told otherwise, and returns their names.

    Whatever pdoc warns of is an error.
    """
    found = modules(importlib.import_module("meshtrain"))
    for module in found:
        if hasattr(module, "__all__") and hasattr(module, "__path__"):
            for name in module.__all__:
                getattr(module, name)  # those that are imported when they are asked for
            below = (m.__name__.rpartition(".") for m in found)
            module.__all__ += [
                name
                for parent, _, name in below
                if parent == module.__name__ and name not in module.__all__
            ]
    # Our docstrings are Markdown; pdoc's default first reads them as reStructuredText.
    pdoc.render.configure(docformat="markdown", show_source=sources)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("meshtrain", output_directory=directory)
    return [module.__name__ for module in found]


if __name__ == "__main__":
    print(f"{len(build(Path(sys.argv[1])))} pages in {sys.argv[1]}")

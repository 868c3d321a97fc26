"""Source `stdlib`: the Python files of the standard library, which every machine has."""

import sysconfig

from meshtrain.config.schema import DataConfig
from meshtrain.data.cache import open_files
from meshtrain.data.inputs import Found, find
from meshtrain.data.opened import Source
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.data.unit import Options

VALIDATION = 0.05  # of a few hundred files one in a hundred would be too little to measure a loss on


def open_stdlib(data: DataConfig, tokenizer: Tokenizer) -> Source:
    """Its text field and its bad documents are no question: these are plain files."""
    options = Options(data.tokenizer, VALIDATION if data.validation is None else data.validation)
    return open_files(stdlib_files(), "stdlib", options, tokenizer, data)


def stdlib_files() -> Found:
    """Without its tests and without what was installed beside it."""
    without = ("site-packages", "dist-packages", "test", "tests", "idle_test")
    return find([sysconfig.get_paths()["stdlib"]], lambda name: name.endswith(".py"), without)

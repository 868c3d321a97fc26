"""What needs a library says which."""

import importlib.util
import re

import pytest

from meshtrain.config import ConfigError
from meshtrain.data.input_files import find
from meshtrain.errors import install_command


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.jsonl.zst", "Zstandard .* zstandard library"),
        ("a.parquet", "Parquet file .* pyarrow library"),
    ],
)
def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(
    tmp_path, name, said, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda library: None)
    (tmp_path / name).write_bytes(b"x")
    for given in (tmp_path, tmp_path / name):
        with pytest.raises(
            ConfigError,
            match=rf"{said}.* not installed: {re.escape(install_command('data'))}",
        ):
            find([str(given)])

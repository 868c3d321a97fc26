"""What gradients cannot be sent as is refused in one sentence, and what has no use is said."""

import itertools
import re

import pytest
from refusals import tells

from meshtrain.config import ConfigError, load
from meshtrain.config.notes import notes

BATCH = ["train.global_batch_size=8"]


def asked(*changes):
    return load(None, [*BATCH, "parallel.reduce.compression=int8", *changes])


def test_compression_over_data_needs_shards_to_scatter_to():
    with pytest.raises(ConfigError) as refused:
        asked("mesh.data=4", "parallel.zero_stage=0")
    assert re.search(r"parallel\.zero_stage is 0; .* 1, 2 or 3\.", str(refused.value))
    with pytest.raises(ConfigError, match=r"or parallel\.reduce\.over to islands"):
        asked("mesh.data=4", "mesh.islands=2", "parallel.zero_stage=0")
    asked(
        "mesh.data=4",
        "mesh.islands=2",
        "parallel.zero_stage=0",
        "parallel.reduce.over=islands",
    )
    asked("mesh.data=1", "parallel.zero_stage=0")
    for stage, hold in itertools.product((1, 2, 3), ("true", "false")):
        asked(
            "mesh.data=4",
            f"parallel.zero_stage={stage}",
            f"parallel.zero_hold={hold}",
            "parallel.microbatches=2",
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("mesh.data=1",), "has no use with mesh.data 1"),
        (
            ("mesh.data=4", "parallel.reduce.over=islands"),
            "no use over islands ... mesh.islands 1",
        ),
        (("mesh.data=4", "mesh.islands=2", "parallel.reduce.over=islands"), ""),
        (("mesh.data=4",), ""),
    ],
)
def test_compression_that_compresses_nothing_is_said(changes, said):
    found = [note for note in notes(asked(*changes)) if "compression" in note]
    assert [tells(note, said) for note in found] == [True] * bool(said)


@pytest.mark.parametrize(
    "given", ["block=8", "block=100000", "compression=int7", "over=rack"]
)
def test_other_values_are_refused_with_what_is_legal(given):
    with pytest.raises(ConfigError, match=given.split("=")[0]):
        asked(f"parallel.reduce.{given}")

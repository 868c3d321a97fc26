"""What Orbax cannot read, or would hand back unread, is one sentence."""

import jax
import pytest
from checkpoint_runs import saved

from meshtrain.checkpoint import arrays
from meshtrain.config import ConfigError


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("run"), steps=1) / "checkpoints" / "1" / "arrays"


@pytest.mark.parametrize(
    "name, shape, sentence",
    [
        (
            "params.head.weight",
            (24, 256),
            r"arrays cannot be read by Orbax .*: Requested shape: \(24, 256\) is not compat",
        ),
        ("params.head.nothing", (24, 257), r"arrays has no array params\.head\.nothing\.$"),
    ],
)
def test_an_array_that_is_not_as_the_manifest_says_is_one_sentence(name, shape, sentence, directory):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ConfigError, match=sentence) as refused:
        arrays.read(directory, {name: jax.ShapeDtypeStruct(shape, "float32", sharding=device)})
    assert "\n" not in str(refused.value)

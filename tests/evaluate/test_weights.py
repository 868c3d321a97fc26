"""What weights in 8 bits cost: the command says the perplexity of the model that generates so."""

import json

import pytest
from tiny_models import hugging_face

from meshtrain.evaluate.__main__ import main as evaluate
from meshtrain.generate.__main__ import main as generate

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(hugging_face(tmp_path_factory.mktemp("models") / "tiny"))


def loss(capsys, *words):
    capsys.readouterr()
    assert evaluate([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["nats_per_token"]


def test_evaluate_tells_the_loss_with_weights_in_8_bits(model, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(
        "a model says what it has read, and no more than that. " * 8
    )
    words = [model, "--text", str(tmp_path / "text.txt"), "--length", "32"]
    whole, *rounded = (
        loss(capsys, *words, *more)
        for more in ([], ["--weights", "int8"], ["--weights", "float8"])
    )
    assert (
        all(0 < abs(one - whole) < 0.05 * whole for one in rounded)
        and rounded[0] != rounded[1]
    )


def test_generate_says_how_many_bytes_the_weights_take(model, capsys):
    assert (
        generate([model, "--prompt", "hello", "--tokens", "3", "--weights", "int8"])
        == 0
    )
    said = capsys.readouterr()
    assert (
        "weights held in int8 take " in said.err
        and " in float32." in said.err
        and "held" not in said.out
    )
    assert generate([model, "--prompt", "hello", "--tokens", "3"]) == 0
    assert "held" not in capsys.readouterr().err

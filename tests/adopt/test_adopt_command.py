"""The command's words, and its sentences."""

import pytest

pytest.importorskip("safetensors")

from golden import GOLDEN

import meshtrain as mt
from meshtrain.adopt.__main__ import main


def test_inspect_tells_the_section_that_a_config_takes(capsys, tmp_path):
    assert main(["inspect", str(GOLDEN / "qwen2")]) == 0
    said = capsys.readouterr().out
    assert "6,208 parameters" in said or "parameters (" in said
    (tmp_path / "x.yaml").write_text(said)
    assert mt.load(tmp_path / "x.yaml").model.qkv_bias is True


def test_a_run_is_exported_and_read_again_with_the_same_logits(capsys, tmp_path):
    config = mt.load(
        {
            "run": {"directory": str(tmp_path / "run")},
            "model": {"family": "qwen3", "layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "vocab_size": 260},
            "data": {"source": "synthetic"},
            "train": {"steps": 1, "global_batch_size": 2, "sequence_length": 8},
        }
    )
    assert mt.train(config) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    one, two = (mt.read_model(tmp_path / name)([[5, 6, 7, 8]]) for name in ("run", "hf"))
    assert (one == two).all()


@pytest.mark.parametrize(
    "words, says",
    [
        (["inspect", "/no/such"], "/no/such/config.json cannot be read"),
        (["export", str(GOLDEN / "gpt2"), str(GOLDEN)], "is there already"),
        (["exprot", "a", "b"], "did you mean export?"),
        (
            ["export", str(GOLDEN / "gpt2"), "/no/such/out", "--tokenizer", "/no/such"],
            "no directory with a tokenizer.json",
        ),
    ],
)
def test_a_mistake_gets_one_sentence(capsys, words, says):
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr().err
    assert code == 2 and says in said and len(said.strip().splitlines()) == 1

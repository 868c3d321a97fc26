"""What is advised for a plan that does not fit, is what a run then does."""

from meshtrain.config import load, to_yaml
from meshtrain.plan import advice, named, plan


def test_to_keep_less_of_what_is_named_is_advised_in_settings_that_a_run_takes(llama_8b, tmp_path):
    kept = ("attention_out", "mlp_hidden")
    config = llama_8b({"data": 4, "tensor": 4}, microbatches=1, remat="names", remat_keep=kept)
    over = plan(config, named("a100-40", 16))
    path = tmp_path / "run.yaml"
    # As a person writes it: what follows from other keys is left out, and so follows from them as they are advised.
    path.write_text(to_yaml(config).replace("  zero_hold: false\n", ""))
    found = [change for change in advice.cheapest(over, count=100) if "remat_keep" in str(change.settings)]
    values = {s for change in found for s in change.settings if "remat_keep" in s}
    assert {"parallel.remat_keep=[]", "parallel.remat_keep=[mlp_hidden]"} <= values
    for change in found:
        assert plan(load(path, list(change.settings)), over.cluster).bytes == change.nbytes

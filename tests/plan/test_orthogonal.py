"""Muon's part of a plan: traffic, memory and seconds."""

import pytest

from meshtrain.config import load, replaced
from meshtrain.plan import named, plan, traffic
from meshtrain.plan.compiled import compile_step

MODEL = {
    "layers": 4,
    "d_model": 256,
    "heads": 4,
    "kv_heads": 4,
    "d_ff": 1024,
    "vocab_size": 512,
}


def config_of(mesh, optimizer="muon", model=None, **sections):
    return load(
        {
            "model": MODEL | (model or {}),
            "mesh": mesh,
            "optimizer": {"name": optimizer},
            "train": {"global_batch_size": 8, "sequence_length": 16},
            **sections,
        }
    )


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "tensor": 2}], ids=str)
def test_traffic_of_a_step_with_muon_is_that_of_the_compiled_one(mesh):
    config = config_of(mesh)
    sent = compile_step(config, "cpu").sent()
    for axis, nbytes in traffic.by_axis(
        plan(config, named("cpu", 8)).transfers
    ).items():
        if nbytes > 4096:
            assert nbytes == pytest.approx(sent[axis], rel=0.02), axis


IN_UPDATE = {
    "one device, narrow": ({"data": 1}, {"layers": 2, "d_ff": 256}, {}),
    "one device": ({"data": 1}, {"layers": 2, "d_ff": 1024}, {}),
    "one device, wide": ({"data": 1}, {"layers": 2, "d_ff": 4096}, {}),
    "stage 3": ({"data": 8}, {"d_ff": 4096}, {"zero_stage": 3}),
    "stage 1, tensor": ({"data": 4, "tensor": 2}, {"d_ff": 4096}, {"zero_stage": 1}),
    "stage 1, tensor, pipeline": (
        {"data": 2, "tensor": 2, "pipeline": 2},
        {"d_ff": 4096},
        {"zero_stage": 1, "microbatches": 2},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_UPDATE)
def test_memory_of_a_step_that_is_fullest_in_muons_update_is_that_of_the_compiled_one(
    name,
):
    mesh, model, parallel = IN_UPDATE[name]
    config = config_of(mesh, model=model, parallel=parallel)
    planned = plan(config, named("cpu", config.mesh.devices))
    assert "matrices as they are iterated" in {item.name for item in planned.memory}
    assert planned.bytes == pytest.approx(
        compile_step(config, "cpu").total_bytes, rel=0.05
    )


@pytest.mark.parametrize("mesh", [{"data": 64}, {"data": 8, "tensor": 8}], ids=str)
def test_seconds_of_a_step_count_muons_products_and_messages(mesh, llama_8b):
    """5 iterations of 2 (m, m, n) and a (m, m, m) each, of the matrices of the fullest rank."""

    def planned(optimizer):
        train = {"global_batch_size": 64, "sequence_length": 4096}
        config = replaced(
            llama_8b(mesh, train, microbatches=1), optimizer={"name": optimizer}
        )
        return plan(config, named("h100", 64)).time

    muon, adamw = planned("muon"), planned("adamw")
    flops = named("h100", 64).accelerator.flops("float32")
    m, n, narrow = 4096, 14336, 1024
    # 64 of q and out, 64 of k and v, 96 of the MLP on 64 ranks
    products = (
        (6 * m**3) + (4 * narrow**2 * m + 2 * narrow**3) + 2 * (4 * m**2 * n + 2 * m**3)
    )
    if mesh["data"] == 64:
        least = 5 * products / flops
        assert least < muon.optimizer - adamw.optimizer < 2 * least
    assert muon.optimizer > adamw.optimizer and muon.data > adamw.data
    assert muon.matmul == adamw.matmul

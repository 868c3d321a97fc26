"""Rollouts in a plan: what synchronising sends, what drawing holds and takes, and who plans none."""

from collections import defaultdict

import pytest
from covering import thorough_but

import meshtrain as mt
from meshtrain.config import load, replaced
from meshtrain.generate.forward import DecodingForward
from meshtrain.generate.resharding import Resharding
from meshtrain.hlo import collectives
from meshtrain.plan import rollouts

MODEL = {"layers": 3, "d_model": 16, "heads": 4, "kv_heads": 2, "d_ff": 30, "vocab_size": 61}
EXPERTS = {"family": "mixtral", "d_ff": 0, "moe": {"experts": 4, "top_k": 2, "d_ff": 10}}
WIDE = EXPERTS | {"moe": {"experts": 4, "top_k": 2, "d_ff": 36}}
RL = {"prompts": "prompts.jsonl", "reward": "exact", "group": 4, "answers": 8}
MESHES = {
    "one": {},
    "data 8, ZeRO-3": {"mesh": {"data": 8}, "parallel": {"zero_stage": 3}},
    "2x2x2, ZeRO-3": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3},
    },
    "edge": {"mesh": {"tensor": 4, "pipeline": 2}, "parallel": {"vocab": "edge"}},
    "tied, split by hand": {
        "model": {"tied_head": True, "layers": 5},
        "mesh": {"tensor": 2, "pipeline": 4},
        "parallel": {"layer_split": [1, 2, 2, 0], "microbatches": 4},
    },
    "context 2": {
        "mesh": {"data": 2, "context": 2, "pipeline": 2},
        "parallel": {"zero_stage": 3, "microbatches": 2},
    },
    "expert 2": {"model": EXPERTS, "mesh": {"data": 4, "expert": 2}, "parallel": {"zero_stage": 2}},
    "expert 2, tensor 2, pipeline 2": {
        "model": EXPERTS,
        "mesh": {"data": 2, "expert": 2, "tensor": 2, "pipeline": 2},
        "parallel": {"zero_stage": 1},
    },
    "experts over tensor": {
        "model": EXPERTS,
        "mesh": {"data": 4, "expert": 2, "tensor": 2},
        "parallel": {
            "zero_stage": 3,
            "sequence_parallel": True,
            "experts": {"dispatch": "all_to_all"},
        },
    },
    "wide experts over tensor": {
        "model": WIDE,
        "mesh": {"data": 4, "expert": 2, "tensor": 2},
        "parallel": {
            "zero_stage": 3,
            "sequence_parallel": True,
            "experts": {"dispatch": "all_to_all"},
        },
    },
    "LoRA": {
        "mesh": {"data": 2, "tensor": 2, "pipeline": 2},
        "lora": {"rank": 2},
        "parallel": {"zero_stage": 3},
    },
}


def config_of(name, **sections):
    given = MESHES[name]
    return load(
        {
            **given,
            "model": MODEL | given.get("model", {}),
            "train": {"objective": "grpo", "global_batch_size": 16, "sequence_length": 32},
            "rl": RL,
            **sections,
        }
    )


def program_of(config):
    return mt.Program(
        replaced(config, train={"objective": "next_token"}, rl={"prompts": None, "reward": None})
    )


@pytest.mark.parametrize("name", thorough_but(list(MESHES), lambda _: False, ["2x2x2, ZeRO-3"]))
def test_synchronising_is_planned_to_send_what_the_compiled_program_sends(name):
    config = config_of(name)
    program = program_of(config)
    ways = program.mesh.size // program.mesh.shape["tensor"]
    way = Resharding(program.layout, DecodingForward(program, ways, 16).layout)
    compiled = way.program.lower(program.layout.masters).compile()
    sent = defaultdict(float)
    for c in collectives(compiled, program.mesh):
        if c.axes:
            sent[frozenset(c.axes)] += c.sent * c.times
    planned = defaultdict(float)
    for transfer in rollouts.synchronisation(config):
        planned[frozenset(transfer.axis.split("+"))] += transfer.sent
    assert planned == sent

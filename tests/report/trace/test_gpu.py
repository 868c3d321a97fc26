"""What GPUs leave in a trace, in traces made by hand: streams, NCCL's kernels, copies, command buffers.

No GPU was there.
"""

import dataclasses
from pathlib import Path

import pytest
from refusals import tells
from xspaces import FACTS_OF_GPUS, HLO, Told, microseconds, written

from meshtrain.report.trace import attribute, read_trace
from meshtrain.report.trace.attribution import Attribution

COMPUTE, NCCL = "Stream #13(Compute)", "Stream #21(NCCL)"
REDUCES, SENDS = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
)


def kernel(op: str, begin: float, end: float, name: str = "", **stats: int) -> Told:
    return name or op, begin, end, {"hlo_op": op, "hlo_module": "jit__train"} | stats


def seen(
    directory: Path, *devices: dict[str, list[Told]], facts=FACTS_OF_GPUS
) -> Attribution:
    """What is told of one step of 100 µs."""
    host = {"/host:CPU": {"python": [("train", 0, 100, {"step_num": 5})]}}
    planes = host | {f"/device:GPU:{k}": lines for k, lines in enumerate(devices)}
    return attribute(read_trace(written(directory, HLO, planes, facts)))


def test_a_collective_counts_with_what_no_compute_on_another_stream_hides(tmp_path):
    told = seen(
        tmp_path,
        {
            COMPUTE: [kernel("forward", 10, 40), kernel("backward", 60, 90)],
            NCCL: [
                kernel("reduce-start", 30, 50, REDUCES),
                kernel("gather-start", 85, 95, "ncclDevKernel_AllGather_RING_LL()"),
            ],
        },
    )
    assert microseconds(told) == {
        "forward": 30,
        "backward": 30,
        "tensor": 10,
        "data": 5,
        "host": 15,
        "idle": 10,
    }
    assert told.wall_seconds == pytest.approx(
        100e-6
    ) and told.attributed == pytest.approx(0.9)
    assert told.collectives == {("all-reduce", "tensor"): 1, ("all-gather", "data"): 1}
    assert told.unjoined == 0 and not told.waiting


def test_devices_are_looked_at_apart_and_their_mean_is_told(tmp_path):
    told = seen(
        tmp_path,
        {COMPUTE: [kernel("forward", 0, 100)]},
        {COMPUTE: [kernel("forward", 0, 40), kernel("head", 60, 100)]},
    )
    assert microseconds(told) == {"forward": 70, "head": 20, "idle": 10}
    assert told.devices == 2


def test_what_runs_on_two_streams_at_once_shares_their_time(tmp_path):
    told = seen(
        tmp_path,
        {
            COMPUTE: [kernel("forward", 0, 100)],
            "Stream #14(Compute)": [kernel("backward", 50, 100)],
        },
    )
    assert microseconds(told) == {"forward": 75, "backward": 25}


def test_lines_that_say_the_same_once_more_and_other_programs_are_no_part_of_a_step(
    tmp_path,
):
    other = ("fusion", 40, 60, {"hlo_op": "fusion", "hlo_module": "jit__evaluate"})
    told = seen(
        tmp_path,
        {
            COMPUTE: [kernel("forward", 0, 40), other],
            "XLA Ops": [kernel("forward", 0, 100)],
        },
    )
    assert microseconds(told) == {"forward": 40, "host": 60}


def test_ncc_ls_kernels_tell_waiting_and_moving_together_and_that_is_said(tmp_path):
    told = seen(tmp_path, {NCCL: [kernel("send-start", 0, 100, SENDS)]})
    assert microseconds(told) == {"pipeline": 100}
    assert (
        not told.moving
        and not told.waiting
        and any("wait and move in one" in s for s in told.cannot_tell)
    )


def test_copies_of_no_instruction_are_the_hosts_where_nothing_else_runs(tmp_path):
    told = seen(
        tmp_path,
        {
            COMPUTE: [kernel("forward", 0, 90)],
            "Stream #15(MemcpyH2D)": [("MemcpyH2D", 80, 100, {})],
        },
    )
    assert microseconds(told) == {"forward": 90, "host": 10}
    assert told.unjoined == 0


def test_what_ran_in_a_command_buffer_is_unknown_and_the_flag_that_names_it_is_said(
    tmp_path,
):
    graph = {"cuda_graph_id": 3}
    told = seen(
        tmp_path,
        {
            COMPUTE: [
                kernel("called", 0, 50, "loop_add_fusion", **graph),
                kernel("called", 50, 70, REDUCES, **graph),
                kernel("backward", 70, 100),
            ]
        },
    )
    # the only all-reduce of the program is over tensor
    assert microseconds(told) == {"unknown": 50, "tensor": 20, "backward": 30}
    assert told.attributed == pytest.approx(0.5)
    assert any(
        "XLA_FLAGS=--xla_gpu_enable_command_buffer= " in sentence
        for sentence in told.cannot_tell
    )


def test_without_command_buffers_nothing_is_said_of_them(tmp_path):
    assert seen(tmp_path, {COMPUTE: [kernel("forward", 0, 100)]}).cannot_tell == []


def test_a_kernel_of_nccl_in_a_buffer_has_no_axis_where_the_program_has_several(
    tmp_path,
):
    two = HLO.replace(
        "ROOT %called",
        "%more = f32[8]{0} all-reduce(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add\n  ROOT %called",
    )
    planes = {
        "/host:CPU": {"python": [("train", 0, 100, {"step_num": 5})]},
        "/device:GPU:0": {
            COMPUTE: [kernel("command_buffer.1", 0, 100, REDUCES, cuda_graph_id=1)]
        },
    }
    told = attribute(read_trace(written(tmp_path, two, planes)))
    assert microseconds(told) == {"unknown": 100} and told.collectives == {
        ("all-reduce", "unknown"): 1
    }


def test_idle_slots_that_are_computed_all_the_same_are_masked_work(tmp_path):
    facts = dataclasses.replace(
        FACTS_OF_GPUS, masked={"forward": 0.25, "backward": 0.5, "head": 0.0}
    )
    kernels = [
        kernel("forward", 0, 40),
        kernel("backward", 40, 60),
        kernel("again", 60, 70),
        kernel("head", 70, 100),
    ]
    told = seen(tmp_path, {COMPUTE: kernels}, facts=facts)
    assert microseconds(told) == {
        "forward": 30,
        "backward": 10,
        "recomputation": 5,
        "head": 30,
        "masked": 25,
    }


def test_events_of_another_program_are_counted_as_unjoined_and_said(tmp_path):
    told = seen(tmp_path, {COMPUTE: [kernel("fusion.77", 0, 100)]})
    assert told.unjoined == 1 and microseconds(told) == {"unknown": 100}
    (sentence,) = told.cannot_tell
    assert tells(sentence, "1 of 1 events", "no instruction")


def test_a_trace_in_which_no_gpu_ran_says_so(tmp_path):
    told = seen(tmp_path)
    assert microseconds(told) == {"host": 100} and "CUPTI" in told.cannot_tell[0]


def test_of_several_processes_the_devices_that_were_not_traced_are_named(tmp_path):
    facts = dataclasses.replace(FACTS_OF_GPUS, processes=2, local=[0, 1, 2, 3])
    told = seen(tmp_path, {COMPUTE: [kernel("forward", 0, 100)]}, facts=facts)
    (sentence,) = told.cannot_tell
    assert tells(sentence, "Only the 4 devices", "first of 2 processes", "of 8.")


def test_a_collective_of_groups_of_one_device_is_for_what_its_names_say(tmp_path):
    alone = HLO.replace(
        "replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add",
        'replica_groups=[8,1]<=[8], to_apply=%add, metadata={op_name="jit(_train)/shard_map/loss_head/psum"}',
    )
    planes = {
        "/host:CPU": {"python": [("train", 0, 100, {"step_num": 5})]},
        "/device:GPU:0": {NCCL: [kernel("reduce-start", 0, 100, REDUCES)]},
    }
    told = attribute(read_trace(written(tmp_path, alone, planes)))
    assert microseconds(told) == {"head": 100} and told.collectives == {
        ("all-reduce", "none"): 1
    }


def test_of_other_accelerators_nothing_is_told(tmp_path):
    told = seen(tmp_path, facts=dataclasses.replace(FACTS_OF_GPUS, platform="tpu"))
    (sentence,) = told.cannot_tell
    assert tells(sentence, "tpu", "not read", "CPUs and GPUs.")

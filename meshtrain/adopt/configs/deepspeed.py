"""DeepSpeed's JSON: a row a key, mappings in mappings joined by dots.

Names, meanings and defaults: its docs/_pages/config-json.md, deepspeed/runtime/constants.py and
deepspeed/runtime/lr_schedules.py. The meaning of "auto", and the keys that must agree with the trainer's: transformers'
src/transformers/integrations/deepspeed.py.
"""

from collections.abc import Mapping
from typing import Any

from meshtrain.adopt.configs import key_rows as rows
from meshtrain.adopt.configs.key_rows import (
    KeyRow,
    LeftOut,
    RefusedValue,
    Table,
    integer,
    lost,
    number,
    switch,
    to,
)

# Their optimizer's parameters that have a key here.
FEWER = "only lr, betas, eps, weight_decay and momentum of an optimizer have a key here"
HOST = (
    "optimizer state goes to host memory here, or nowhere: parallel.offload_optimizer"
)
# Adam is AdamW there, too, unless adam_w_mode says otherwise (deepspeed/runtime/config.py: ADAM_W_MODE_DEFAULT).
OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "lion": "lion",
    "sgd": "sgd",
    "muon": "muon",
}
# The first two rise to a rate of their own, whatever the optimizer's is.
SCHEDULES: Mapping[Any, Mapping[str, Any]] = {
    "WarmupLR": {"optimizer.schedule": "constant", "usual peak": 0.001},
    "WarmupDecayLR": {
        "optimizer.schedule": "linear",
        "optimizer.final_ratio": 0.0,
        "usual peak": 0.001,
    },
    "WarmupCosineLR": {"optimizer.schedule": "cosine"},
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16"}


def _optimizer(value: Any) -> dict[str, Any]:
    name = OPTIMIZERS.get(str(value).lower())
    if name is None:
        raise LeftOut(
            "no optimizer of this name is here, so adamw stands", matters=True
        )
    return {"optimizer.name": name, rows.DIFFERS: rows.OTHERWISE.get(name, "")}


def _betas(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise RefusedValue("it must be a list of two numbers")
    return {"optimizer.beta1": number(value[0]), "optimizer.beta2": number(value[1])}


def _schedule(value: Any) -> Mapping[str, Any]:
    if value not in SCHEDULES:
        raise LeftOut(
            "no schedule of this name is here, so cosine stands", matters=True
        )
    return SCHEDULES[value]


def _offload(value: Any) -> dict[str, Any]:
    if value == "nvme":
        raise LeftOut(HOST)
    return {} if value in ("none", None) else {"parallel.offload_optimizer": True}


def _reduce(value: Any) -> str:
    if value not in DTYPES:
        raise LeftOut("gradients are summed in float32 or bfloat16 here")
    return DTYPES[value]


def _alone(value: Any) -> dict[str, Any]:
    if integer(value) > 1:
        raise RefusedValue("there is no context parallelism here")
    return {}


def _here(value: Any, read: Any, why: str) -> KeyRow:
    """Returns a row for a key of which one value is what is done here, and any other changes what is learned."""

    def becomes(given: Any) -> dict[str, Any]:
        if read(given) != value:
            raise LeftOut(why, matters=True)
        return {}

    return KeyRow(becomes)


TABLE: Table = {
    "train_batch_size": to("rows a step", integer),
    "train_micro_batch_size_per_gpu": to("rows a device", integer),
    "gradient_accumulation_steps": to("accumulation", integer),
    "gradient_clipping": to("optimizer.grad_clip", number, default=0.0),
    "seed": to("run.seed", integer),
    "optimizer.type": KeyRow(_optimizer),
    "optimizer.params.lr": to("optimizer.learning_rate", number, default=1e-3),
    "optimizer.params.betas": KeyRow(_betas),
    "optimizer.params.eps": to("optimizer.eps", number, default=1e-8),
    "optimizer.params.weight_decay": to("optimizer.weight_decay", number, default=0.0),
    "optimizer.params.max_grad_norm": to("optimizer.grad_clip", number),
    "optimizer.params.momentum": to("momentum", number),
    "optimizer.params.bias_correction": lost(
        "Adam's moments are corrected for their beginning here", None, True
    ),
    "optimizer.params.adam_w_mode": _here(
        True, switch, "weight decay is always decoupled here (AdamW)"
    ),
    "optimizer.params.": lost(FEWER),
    "scheduler.type": KeyRow(_schedule),
    "scheduler.params.warmup_max_lr": to("optimizer.learning_rate", number),
    "scheduler.params.warmup_num_steps": to("warm-up steps", integer, default=1000),
    "scheduler.params.total_num_steps": to("train.steps", integer),
    "scheduler.params.cos_min_ratio": to(
        "optimizer.final_ratio", number, default=0.0001
    ),
    "scheduler.params.warmup_min_lr": _here(
        0, number, "the warm-up begins at its first rung here"
    ),
    "scheduler.params.warmup_min_ratio": _here(
        0, number, "the warm-up begins at its first rung here"
    ),
    "scheduler.params.warmup_type": _here(
        "linear", lambda value: value, "the warm-up is linear here"
    ),
    "bf16.enabled": to("bf16", switch),
    "bfloat16.enabled": to("bf16", switch),
    "fp16.enabled": to("fp16", switch),
    "fp16.loss_scale": _here(
        0, number, "the loss scale is always dynamic here, which 0 stands for"
    ),
    "fp16.initial_scale_power": KeyRow(
        lambda value: {"precision.loss_scale": 2.0 ** integer(value)}
    ),
    "fp16.loss_scale_window": to("precision.loss_scale_window", integer),
    "fp16.hysteresis": to("precision.loss_scale_hysteresis", integer),
    "communication_data_type": to("precision.reduce", _reduce),
    # before it was a mapping it was a switch, for stage 1
    "zero_optimization": KeyRow(
        lambda value: (
            {"parallel.zero_stage": int(value)} if isinstance(value, bool) else {}
        )
    ),
    "zero_optimization.stage": to("parallel.zero_stage", integer),
    "zero_optimization.offload_optimizer.device": KeyRow(_offload),
    "zero_optimization.cpu_offload": rows.where_on("parallel.offload_optimizer"),
    "tensor_parallel.autotp_size": KeyRow(
        lambda value: {"mesh.tensor": integer(value)} if integer(value) > 1 else {}
    ),
    "sequence_parallel_size": KeyRow(_alone),
    "activation_checkpointing.partition_activations": KeyRow(
        lambda value: {"parallel.remat": "full"} if value else {}
    ),
    "tensorboard.enabled": rows.where_on("tracker tensorboard"),
    "wandb.enabled": rows.where_on("tracker wandb"),
    **rows.all_lost(
        {
            "precision.compute says it": "amp.enabled torch_autocast.enabled",
            "of this there is nothing here": "data_efficiency.enabled curriculum_learning.enabled "
            "progressive_layer_drop.enabled quantize_training.enabled "
            "elasticity.enabled sparse_attention. compression_training. zenflow. zero_optimization.zenflow.",
        }
    ),
    **rows.left(
        {
            "how state is moved to the host is the compiler's": "offload_optimizer. cpu_offload_use_pin_memory",
            "weights stay on the devices here; mesh.tensor, mesh.pipeline and ZeRO-3 divide them": "offload_param. "
            "cpu_offload_params",
            "parallel.zero_stage shards all weights alike, and sends them in their own dtype": "zero_hpz_partition_size"
            " zero_quantized_weights zero_quantized_gradients "
            "zero_quantized_nontrainable_weights mics_shard_size "
            "mics_hierarchical_params_gather stage3_param_persistence_threshold param_persistence_threshold "
            "model_persistence_threshold",
            "when what is sent is arranged by the compiler, within parallel.zero_stage": "allgather_partitions "
            "allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size contiguous_gradients sub_group_size "
            "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
            "stage3_max_reuse_distance "
            "max_reuse_distance round_robin_gradients use_multi_rank_bucket_allreduce use_all_reduce_for_fetch_params "
            "stage3_use_all_reduce_for_fetch_params stage3_module_granularity_threshold module_granularity_threshold "
            "parameter_alignment compute_grad_norm pipeline_loading_checkpoint override_module_apply "
            "log_trace_cache_warnings "
            "memory_efficient_linear ignore_unused_parameters",
            "what is saved is whole, and loads onto any mesh": "stage3_gather_16bit_weights_on_model_save "
            "gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
            "load_from_fp32_weights elastic_checkpoint legacy_stage1",
        },
        within="zero_optimization.",
    ),
    **rows.left(
        {
            "it is the same optimizer": "optimizer.params.torch_adam",
            FEWER: "optimizer.legacy_fusion",
            "a run goes on from its newest checkpoint": "scheduler.params.last_batch_iteration",
            "a schedule has its warm-up, its end and its shape here": "scheduler.params.",
            "each projection's place on mesh.tensor is fixed here": "tensor_parallel.",
            "parallel.remat_offload names activations that go to the host": "activation_checkpointing."
            "cpu_checkpointing",
            "parallel.remat is of each layer": "activation_checkpointing.number_checkpoints",
            "parallel.remat says what is computed again": "activation_checkpointing.",
            "when what is sent is arranged by the compiler, within parallel.zero_stage": "prescale_gradients "
            "gradient_predivide_factor sparse_gradients disable_allgather comms_config. comms_logger. "
            "graph_harvesting compile. timers. managed_gradient_accumulation data_types. seq_parallel_comm_data_type",
            "what is saved is whole, and loads onto any mesh": "checkpoint. load_universal_checkpoint nebula.",
            "any optimizer is sharded here": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
            "the loss scale has its start, its window and its hysteresis here": "fp16.min_loss_scale "
            "fp16.consecutive_hysteresis fp16.auto_cast fp16.fused_mode fp16.opt_level",
            "what is trained is kept in float32": "fp16.fp16_master_weights_and_grads "
            "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
            "bf16.immediate_grad_update bf16.check_grad_overflow bf16.auto_cast",
            "precision.compute says it": "amp. torch_autocast.",
            "it only prints (log.every, and meshtrain report)": "steps_per_print wall_clock_breakdown "
            "memory_breakdown dump_state flops_profiler. monitor_config. csv_monitor. "
            "tensorboard. wandb. comet. vocabulary_size eigenvalue.",
            HOST: "aio.",
            "it is a comment": "_comment comment",
            "how examples are read ahead is arranged otherwise (data.prefetch)": "dataloader_drop_last",
            "of this there is nothing here": "data_efficiency. curriculum_learning. progressive_layer_drop. "
            "hybrid_engine. elasticity. autotuning. "
            "inference_checkpoint. weight_quantization. quantize_training. pipeline. "
            "use_data_before_expert_parallelism",
        }
    ),
}

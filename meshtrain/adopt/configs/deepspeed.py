"""DeepSpeed's JSON: a row a key, mappings in mappings joined by dots.

Names, meanings and defaults: its docs/_pages/config-json.md, deepspeed/runtime/constants.py and deepspeed/runtime/lr_schedules.py. What
"auto" stands for, and which keys must agree with the trainer's: transformers' src/transformers/integrations/deepspeed.py.
"""

from typing import Any

from meshtrain.adopt.configs.key_rows import (
    DIFFERS,
    OTHERWISE,
    KeyRow,
    LeftOut,
    RefusedValue,
    Table,
    all_lost,
    integer,
    left,
    lost,
    number,
    switch,
    to,
    where_on,
)  # fmt: skip

# Their optimizer's parameters that have a key here.
FEWER = "only lr, betas, eps, weight_decay and momentum of an optimizer have a key here"
BUFFERS = "when what is sent is arranged by the compiler, within parallel.zero_stage"


def _optimizer(value: Any) -> dict[str, Any]:
    """Adam is AdamW there, too, unless adam_w_mode says otherwise (deepspeed/runtime/config.py: ADAM_W_MODE_DEFAULT)."""
    known = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon"}
    if str(value).lower() not in known:
        raise LeftOut("no optimizer of this name is here, so adamw stands", matters=True)
    name = known[str(value).lower()]
    return {"optimizer.name": name, DIFFERS: OTHERWISE.get(name, "")}


def _decoupled(value: Any) -> dict[str, Any]:
    if not switch(value):
        raise LeftOut("weight decay is always decoupled here (AdamW)", matters=True)
    return {}


def _betas(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise RefusedValue("it must be a list of two numbers")
    return {"optimizer.beta1": number(value[0]), "optimizer.beta2": number(value[1])}


def _schedule(value: Any) -> dict[str, Any]:
    """The first two rise to a rate of their own, whatever the optimizer's is."""
    known: dict[str, dict[str, Any]] = {
        "WarmupLR": {"optimizer.schedule": "constant", "usual peak": 0.001},
        "WarmupDecayLR": {"optimizer.schedule": "linear", "optimizer.final_ratio": 0.0, "usual peak": 0.001},
        "WarmupCosineLR": {"optimizer.schedule": "cosine"},
    }
    if value not in known:
        raise LeftOut("no schedule of this name is here, so cosine stands", matters=True)
    return known[value]


def _from_zero(value: Any) -> dict[str, Any]:
    if number(value):
        raise LeftOut("the warm-up begins at its first rung here", matters=True)
    return {}


def _ramp(value: Any) -> dict[str, Any]:
    if value != "linear":
        raise LeftOut("the warm-up is linear here", matters=True)
    return {}


def _scale(value: Any) -> dict[str, Any]:
    if number(value):
        raise LeftOut("the loss scale is always dynamic here, which 0 stands for", matters=True)
    return {}


def _offload(value: Any) -> dict[str, Any]:
    if value in ("none", None):
        return {}
    if value == "nvme":
        raise LeftOut("optimizer state goes to host memory here, or nowhere: parallel.offload_optimizer")
    return {"parallel.offload_optimizer": True}


def _sum(value: Any) -> dict[str, Any]:
    known = {"fp32": "float32", "bf16": "bfloat16", "bfp16": "bfloat16"}
    if value not in known:
        raise LeftOut("gradients are summed in float32 or bfloat16 here")
    return {"precision.reduce": known[value]}


def _zero(value: Any) -> dict[str, Any]:
    """Before it was a mapping it was a switch, for stage 1."""
    if not isinstance(value, bool):
        return {}
    return {"parallel.zero_stage": int(value)}


def _ranks(value: Any) -> dict[str, Any]:
    return {"mesh.tensor": integer(value)} if integer(value) > 1 else {}


def _alone(why: str) -> KeyRow:
    def becomes(value: Any) -> dict[str, Any]:
        if integer(value) > 1:
            raise RefusedValue(why)
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
    "optimizer.params.bias_correction": lost("Adam's moments are corrected for their beginning here", None, True),
    "optimizer.params.torch_adam": KeyRow(why="it is the same optimizer"),
    "optimizer.params.adam_w_mode": KeyRow(_decoupled),
    "optimizer.params.": lost(FEWER),
    "optimizer.legacy_fusion": KeyRow(why=FEWER),
    "scheduler.type": KeyRow(_schedule),
    "scheduler.params.warmup_max_lr": to("optimizer.learning_rate", number),
    "scheduler.params.warmup_num_steps": to("warm-up steps", integer, default=1000),
    "scheduler.params.total_num_steps": to("train.steps", integer),
    "scheduler.params.cos_min_ratio": to("optimizer.final_ratio", number, default=0.0001),
    "scheduler.params.warmup_min_lr": KeyRow(_from_zero),
    "scheduler.params.warmup_min_ratio": KeyRow(_from_zero),
    "scheduler.params.warmup_type": KeyRow(_ramp),
    "scheduler.params.last_batch_iteration": KeyRow(why="a run goes on from its newest checkpoint"),
    "scheduler.params.": KeyRow(why="a schedule has its warm-up, its end and its shape here"),
    "bf16.enabled": to("bf16", switch),
    "bfloat16.enabled": to("bf16", switch),
    "fp16.enabled": to("fp16", switch),
    "fp16.loss_scale": KeyRow(_scale),
    "fp16.initial_scale_power": KeyRow(lambda value: {"precision.loss_scale": 2.0 ** integer(value)}),
    "fp16.loss_scale_window": to("precision.loss_scale_window", integer),
    "fp16.hysteresis": to("precision.loss_scale_hysteresis", integer),
    "communication_data_type": KeyRow(lambda value: {} if value is None else _sum(value)),
    "zero_optimization": KeyRow(_zero),
    "zero_optimization.stage": to("parallel.zero_stage", integer),
    "zero_optimization.offload_optimizer.device": KeyRow(_offload),
    "zero_optimization.cpu_offload": where_on("parallel.offload_optimizer"),
    "zero_optimization.offload_optimizer.": KeyRow(why="how state is moved to the host is the compiler's"),
    "zero_optimization.offload_param.": KeyRow(why="weights stay on the devices here; mesh.tensor, mesh.pipeline and ZeRO-3 divide them"),
    "zero_optimization.cpu_offload_params": KeyRow(why="weights stay on the devices here; mesh.tensor, mesh.pipeline and ZeRO-3 divide them"),
    "zero_optimization.cpu_offload_use_pin_memory": KeyRow(why="how state is moved to the host is the compiler's"),
    "tensor_parallel.autotp_size": KeyRow(_ranks),
    "tensor_parallel.": KeyRow(why="each projection's place on mesh.tensor is fixed here"),
    "sequence_parallel_size": _alone("there is no context parallelism here"),
    "activation_checkpointing.partition_activations": KeyRow(lambda value: {"parallel.remat": "full"} if value else {}),
    "activation_checkpointing.cpu_checkpointing": KeyRow(why="parallel.remat_offload names activations that go to the host"),
    "activation_checkpointing.number_checkpoints": KeyRow(why="parallel.remat is of each layer"),
    "activation_checkpointing.": KeyRow(why="parallel.remat says what is computed again"),
    "tensorboard.enabled": where_on("tracker tensorboard"),
    "wandb.enabled": where_on("tracker wandb"),
    **left("parallel.zero_stage shards all weights alike, and sends them in their own dtype", "zero_optimization.zero_hpz_partition_size",
           "zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients",
           "zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.mics_shard_size",
           "zero_optimization.mics_hierarchical_params_gather", "zero_optimization.stage3_param_persistence_threshold",
           "zero_optimization.param_persistence_threshold", "zero_optimization.model_persistence_threshold"),
    **left(BUFFERS, "zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size", "zero_optimization.overlap_comm",
           "zero_optimization.reduce_scatter", "zero_optimization.reduce_bucket_size", "zero_optimization.contiguous_gradients",
           "zero_optimization.sub_group_size", "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.prefetch_bucket_size",
           "zero_optimization.stage3_max_live_parameters", "zero_optimization.max_live_parameters",
           "zero_optimization.stage3_max_reuse_distance", "zero_optimization.max_reuse_distance",
           "zero_optimization.round_robin_gradients", "zero_optimization.use_multi_rank_bucket_allreduce",
           "zero_optimization.use_all_reduce_for_fetch_params", "zero_optimization.stage3_use_all_reduce_for_fetch_params",
           "zero_optimization.stage3_module_granularity_threshold", "zero_optimization.module_granularity_threshold",
           "zero_optimization.parameter_alignment", "zero_optimization.compute_grad_norm", "zero_optimization.pipeline_loading_checkpoint",
           "zero_optimization.override_module_apply", "zero_optimization.log_trace_cache_warnings",
           "zero_optimization.memory_efficient_linear", "zero_optimization.ignore_unused_parameters", "prescale_gradients",
           "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "comms_config.", "comms_logger.", "graph_harvesting",
           "compile.", "timers.", "managed_gradient_accumulation", "data_types.", "seq_parallel_comm_data_type"),
    **left("what is saved is whole, and loads onto any mesh", "zero_optimization.stage3_gather_16bit_weights_on_model_save",
           "zero_optimization.gather_16bit_weights_on_model_save", "zero_optimization.stage3_gather_fp16_weights_on_model_save",
           "zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint", "zero_optimization.legacy_stage1",
           "checkpoint.", "load_universal_checkpoint", "nebula."),
    **left("any optimizer is sharded here", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    **left("the loss scale has its start, its window and its hysteresis here", "fp16.min_loss_scale", "fp16.consecutive_hysteresis",
           "fp16.auto_cast", "fp16.fused_mode", "fp16.opt_level"),
    **left("what is trained is kept in float32", "fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads",
           "bf16.bf16_optimizer_states", "bf16.immediate_grad_update", "bf16.check_grad_overflow", "bf16.auto_cast"),
    **all_lost("precision.compute says it", "amp.enabled", "torch_autocast.enabled"),
    **left("precision.compute says it", "amp.", "torch_autocast."),
    **all_lost("of this there is nothing here", "data_efficiency.enabled", "curriculum_learning.enabled", "progressive_layer_drop.enabled",
               "quantize_training.enabled", "elasticity.enabled", "sparse_attention.", "compression_training.", "zenflow.",
               "zero_optimization.zenflow."),
    **left("it only prints (log.every, and python -m meshtrain.report)", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
           "dump_state", "flops_profiler.", "monitor_config.", "csv_monitor.", "tensorboard.", "wandb.", "comet.", "vocabulary_size",
           "eigenvalue."),
    **left("optimizer state goes to host memory here, or nowhere: parallel.offload_optimizer", "aio."),
    **left("it is a comment", "_comment", "comment"),
    **left("how examples are read ahead is arranged otherwise (data.prefetch)", "dataloader_drop_last"),
    **left("of this there is nothing here", "data_efficiency.", "curriculum_learning.", "progressive_layer_drop.", "hybrid_engine.",
           "elasticity.", "autotuning.", "inference_checkpoint.", "weight_quantization.", "quantize_training.", "pipeline.",
           "use_data_before_expert_parallelism"),
}  # fmt: skip

"""LLaMA-Factory's YAML for training: a row a key.

Names, meanings and defaults: its src/llamafactory/hparams (model_args, data_args, finetuning_args, training_args,
parser), and transformers' Seq2SeqTrainingArguments (src/transformers/training_args.py), which its training arguments
extend. That gradient
checkpointing is on unless disabled: src/llamafactory/model/model_utils/checkpointing.py. The meaning of a dataset's
name: src/llamafactory/data/parser.py.
"""

import json
from collections.abc import Callable
from typing import Any

from meshtrain.adopt.configs import key_rows as rows
from meshtrain.adopt.configs.key_rows import (
    KeyRow,
    LeftOut,
    Table,
    integer,
    lost,
    number,
    to,
    words,
)

Keys = dict[str, Any]  # of ours, by path

OPTIMIZERS = ("adamw", "adafactor", "sgd", "lion", "muon")
IMPLEMENTATIONS = {
    "torch",
    "fused",
    "hf",
    "32bit",
    "8bit",
    "bnb",
    "4bit",
    "xla",
    "npu",
    "apex",
}  # of one optimizer
TRACKERS = ("tensorboard", "wandb", "mlflow")
STRATEGIES = ("no", "steps", "epoch")
# peft's module names in the families that are here, and those of fused ones.
PROJECTIONS = {
    "q_proj": ["q"], "k_proj": ["k"], "v_proj": ["v"], "o_proj": ["out"], "gate_proj": ["gate"], "up_proj": ["up"],
    "down_proj": ["down"], "qkv_proj": ["q", "k", "v"], "c_attn": ["q", "k", "v"], "gate_up_proj": ["gate", "up"],
    "c_fc": ["up"],
}  # fmt: skip
# Modules that may be trained in full, by the patterns of train.trainable.
MODULES = {
    "embed_tokens": "embedding.tokens", "wte": "embedding.tokens", "lm_head": "head.weight", "norm": "head.norm*",
    "ln_f": "head.norm*", "self_attn": "blocks.attention.*", "attn": "blocks.attention.*", "mlp": "blocks.mlp.*",
    "input_layernorm": "blocks.attention_norm*", "post_attention_layernorm": "blocks.mlp_norm*",
}  # fmt: skip
# What their schedules take beside the steps: where it goes, and how it is read.
SCHEDULE_ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "min_lr": ("final rate", number),
    "min_lr_rate": ("optimizer.final_ratio", number),
    "min_lr_ratio": ("optimizer.final_ratio", number),
    "num_stable_steps": ("stable steps", integer),
    "num_decay_steps": ("decay steps", integer),
    "decay_type": ("decay type", rows.text),
}
# PyTorch's FSDP shards as ZeRO does (Zhao et al. 2023).
FSDP_STAGES = {
    "full_shard": 3,
    "hybrid_shard": 3,
    "shard_grad_op": 2,
    "hybrid_shard_zero2": 2,
    "no_shard": 0,
}


def _stage(stage: Any) -> Keys:
    formats = {"pt": "text", "sft": "chat", "dpo": "pairs"}
    if stage not in formats:
        raise rows.RefusedValue(f"there are {', '.join(formats)} here")
    objective = {"train.objective": "dpo"} if stage == "dpo" else {}
    return {"stage": stage, "data.format": formats[stage]} | objective


def _targets(value: Any) -> list[str]:
    targets: list[str] = []
    for word in words(value):
        if word in ("all", "all-linear"):
            return []
        name = word.rpartition(".")[2]
        if name not in PROJECTIONS:
            raise rows.RefusedValue(
                f"adapters stand beside {', '.join(PROJECTIONS)} here"
            )
        targets += [ours for ours in PROJECTIONS[name] if ours not in targets]
    return targets


def _modules(value: Any) -> list[str]:
    names = [word.rpartition(".")[2] for word in words(value)]
    if not set(names) <= set(MODULES):
        raise rows.RefusedValue(f"what can be trained by name is {', '.join(MODULES)}")
    return [MODULES[name] for name in names]


def _freeze(value: Any) -> Keys:
    if "all" in words(value):
        raise rows.RefusedValue(
            "that trains all of some layers, but train.trainable names weights over all layers"
        )
    return {"frozen but": _modules(value)}


def _optimizer(value: Any) -> Keys:
    """Implementations of one optimizer are alike: adamw_torch_fused is adamw. Paged moments are not here."""
    kind, *how = str(value).lower().removeprefix("paged_").split("_")
    if kind not in OPTIMIZERS or not set(how) <= IMPLEMENTATIONS:
        raise LeftOut(
            "no optimizer of this name is here, so adamw stands", matters=True
        )
    differs = (
        "moments are float32 here"
        if {"8bit", "4bit"} & set(how)
        else rows.OTHERWISE.get(kind, "")
    )
    return {"optimizer.name": kind, rows.DIFFERS: differs}


def _schedule(value: Any) -> Keys:
    """Theirs end at 0 unless they say otherwise, and constant has no warm-up."""
    known: dict[str, Keys] = {
        "linear": {"optimizer.schedule": "linear", "optimizer.final_ratio": 0.0},
        "cosine": {"optimizer.schedule": "cosine", "optimizer.final_ratio": 0.0},
        "cosine_with_min_lr": {"optimizer.schedule": "cosine"},
        "warmup_stable_decay": {"optimizer.schedule": "wsd"},
        "constant_with_warmup": {"optimizer.schedule": "constant"},
        "constant": {"optimizer.schedule": "constant", "no warm-up": True},
    }
    if value not in known:
        raise LeftOut(
            "no schedule of this name is here, so cosine stands", matters=True
        )
    return known[value]


def _schedule_arguments(value: Any) -> Keys:
    """lr_scheduler_kwargs written as JSON in a text; as a mapping its keys have rows of their own."""
    if value in (None, {}, ""):
        return {}
    try:
        arguments = json.loads(value)
    except (TypeError, ValueError):
        raise rows.RefusedValue("it must be a mapping") from None
    if (
        not isinstance(arguments, dict)
        or not arguments.keys() <= SCHEDULE_ARGUMENTS.keys()
    ):
        raise LeftOut(
            f"of a schedule's arguments only {', '.join(SCHEDULE_ARGUMENTS)} have a key here",
            matters=True,
        )
    paths = {key: SCHEDULE_ARGUMENTS[key] for key in arguments}
    return {path: read(arguments[key]) for key, (path, read) in paths.items()}


def _warmup(value: Any) -> Keys:
    """Below 1 it is a share of the steps, as of transformers 5."""
    steps = number(value)
    return {"warm-up share": steps} if 0 < steps < 1 else {"warm-up steps": int(steps)}


def _every(path: str) -> KeyRow:
    """Returns a row for the steps between two of something, in which a share of the run is refused."""

    def read(value: Any) -> int:
        if 0 < number(value) < 1:
            raise LeftOut(f"{path} counts steps, not shares of the run")
        return integer(value)

    return to(path, read)


def _validation(value: Any) -> Keys:
    share = number(value)
    if share >= 1:
        raise LeftOut(
            "data.validation is a share, not a number of examples, so it stands at its own",
            matters=True,
        )
    return {"data.validation": share}


def _trackers(value: Any) -> Keys:
    names = words(value or [])
    if not set(names) <= {*TRACKERS, "none", "all"}:
        raise LeftOut(f"metrics go to {', '.join(TRACKERS)} here")
    return {
        "telemetry.trackers": list(TRACKERS)
        if "all" in names
        else [name for name in names if name in TRACKERS]
    }


def _fsdp(value: Any) -> Keys:
    parts = value.split() if isinstance(value, str) else words(value or [])
    stages = [FSDP_STAGES[part] for part in parts if part in FSDP_STAGES]
    zero: Keys = {"parallel.zero_stage": stages[0]} if stages else {}
    return zero | ({"parallel.offload_optimizer": True} if "offload" in parts else {})


MODEL: Table = {
    "model_name_or_path": KeyRow(lambda value: {"model": rows.text(value)}),
    "train_from_scratch": lost(
        "model.weights begins with weights; put the section that adopt inspect prints in its place"
    ),
    "quantization_bit": lost(
        "nothing is quantized here: weights that are not trained are held in precision.compute"
    ),
    "pure_bf16": KeyRow(
        lambda value: {"pure bf16": True} if value not in (None, False) else {},
        differs="what is trained stays float32, beside weights in bfloat16",
    ),
    "disable_gradient_checkpointing": KeyRow(
        lambda value: {"parallel.remat": "none" if rows.switch(value) else "full"},
        default=False,
    ),
    "gradient_checkpointing": KeyRow(
        lambda value: {"parallel.remat": "full"} if value is True else {}
    ),
    "sequence_parallel_size": rows.only(
        1, "sequences are not divided over data ranks (context parallelism)"
    ),
    "task": rows.only(None, "this file is for a benchmark, not for training"),
    "export_dir": rows.only(None, "this file is for an export, not for training"),
    "shift_attn": lost("LongLoRA's shifted attention is not computed here"),
    "mixture_of_depths": lost("mixture of depths is not computed here"),
    "rope_scaling": lost(
        "the model's own config.json says how its positions are stretched"
    ),
    "adapter_name_or_path": lost(
        "adapters begin anew here; to go on with these, `meshtrain.adopt import --adapter` and checkpoint.resume"
    ),
    "fp8": lost("products are of precision.compute here"),
}

METHOD: Table = {
    "stage": KeyRow(_stage, default="sft"),
    "finetuning_type": KeyRow(
        lambda value: {"tuned": rows.one_of("lora", "full", "freeze")(value)},
        default="lora",
    ),
    "lora_rank": to("lora.rank", integer, default=8),
    "lora_alpha": to("lora.alpha", number),
    "lora_target": to("lora.targets", _targets),
    "lora_dropout": to("lora.dropout", number),
    "use_rslora": to("lora.rslora", rows.switch),
    "additional_target": to("beside adapters", _modules),
    "freeze_trainable_modules": KeyRow(_freeze),
    "freeze_extra_modules": to("frozen but also", _modules),
    "freeze_trainable_layers": lost("train.trainable names weights over all layers"),
    "pref_beta": to("train.dpo_beta", number),
    "pref_loss": rows.only("sigmoid", "that loss is not here"),
    "dpo_label_smoothing": lost("DPO's labels are not smoothed here"),
    "ld_alpha": lost("all tokens of an answer count alike here", None, 1),
    "use_dora": lost("there is LoRA and rsLoRA, but no DoRA"),
    "pissa_init": lost("adapters begin at zero here, so there is no PiSSA"),
    "loraplus_lr_ratio": lost(
        "all adapters have one learning rate here, so there is no LoRA+"
    ),
    "use_llama_pro": lost("blocks are not expanded here"),
    "use_galore": lost("there is no GaLore here"),
    "use_apollo": lost("there is no APOLLO here"),
    "use_badam": lost("there is no BAdam here"),
    "use_adam_mini": lost("there is no Adam-mini here; adamw stands"),
    "use_muon": rows.where_on("optimizer.name", "muon", rows.OTHERWISE["muon"]),
}

DATA: Table = {
    "dataset": to("datasets", words),
    "eval_dataset": to("eval datasets", words),
    "dataset_dir": to("dataset_dir", rows.text, default="data"),
    "cutoff_len": to("train.sequence_length", integer, default=2048),
    "packing": to("packing", rows.switch),
    "neat_packing": KeyRow(
        lambda value: {"packing": True, "neat": True} if rows.switch(value) else {}
    ),
    "val_size": KeyRow(_validation),
    "interleave_probs": to(
        "shares", lambda value: [number(word) for word in words(value)]
    ),
    "train_on_prompt": lost("the loss is on answers alone here"),
    "mask_history": lost("the loss is on every answer of a conversation here"),
    "mix_strategy": lost(
        "data.weights says how sources are mixed, and an epoch ends otherwise",
        None,
        "concat",
    ),
    "max_samples": lost("all examples of the source count"),
    "neftune_noise_alpha": lost("no noise is added to embeddings here"),
    "disable_shuffling": lost("examples are always shuffled, by run.seed"),
    "default_system": lost("the tokenizer's own chat template counts (data.template)"),
    "enable_thinking": lost(
        "the tokenizer's own chat template counts (data.template)", None, True
    ),
    "train_sampling_strategy": lost(
        "examples are always shuffled, by run.seed", None, "random"
    ),
    "ignore_pad_token_for_loss": lost("padding weighs nothing in the loss", None, True),
}

TRAINING: Table = {
    "output_dir": to("run.directory", rows.text),
    "seed": to("run.seed", integer, default=42),
    "do_train": rows.only(True, "this file does not train"),
    "per_device_train_batch_size": to("rows a device", integer, default=8),
    "gradient_accumulation_steps": to("accumulation", integer, default=1),
    "num_train_epochs": to("train.epochs", number, default=3.0),
    "max_steps": KeyRow(
        lambda value: {"train.steps": integer(value)} if integer(value) > 0 else {}
    ),
    "learning_rate": to("optimizer.learning_rate", number, default=5e-5),
    "lr_scheduler_type": KeyRow(_schedule, default="linear"),
    "lr_scheduler_kwargs": KeyRow(_schedule_arguments),
    **{
        f"lr_scheduler_kwargs.{key}": to(*path)
        for key, path in SCHEDULE_ARGUMENTS.items()
    },
    "warmup_ratio": to("warm-up share", number),
    "warmup_steps": KeyRow(_warmup, default=0),
    "optim": KeyRow(_optimizer),
    "weight_decay": to("optimizer.weight_decay", number, default=0.0),
    "adam_beta1": to("optimizer.beta1", number, default=0.9),
    "adam_beta2": to("optimizer.beta2", number, default=0.999),
    "adam_epsilon": to("optimizer.eps", number, default=1e-8),
    "max_grad_norm": to("optimizer.grad_clip", number, default=1.0),
    "label_smoothing_factor": to("train.label_smoothing", number),
    "bf16": to("bf16", rows.switch),
    "fp16": to("fp16", rows.switch),
    "deepspeed": to("deepspeed file", rows.text),
    "fsdp": KeyRow(_fsdp),
    "logging_steps": _every("log.every"),
    "save_steps": _every("checkpoint.every"),
    "save_strategy": to("saved by", rows.one_of(*STRATEGIES, "best")),
    "save_total_limit": to("checkpoint.keep", integer),
    "early_stopping_steps": to("eval.patience", integer),
    "eval_strategy": to("evaluated by", rows.one_of(*STRATEGIES)),
    "evaluation_strategy": to("evaluated by", rows.one_of(*STRATEGIES)),
    "eval_steps": _every("eval steps"),
    "report_to": KeyRow(_trackers),
    "resume_from_checkpoint": lost(
        "a run goes on from its own newest checkpoint (checkpoint.resume names another)",
        None,
        False,
        True,
    ),
    "average_tokens_across_devices": lost(
        "the loss is the mean over all tokens of a step here", None, True
    ),
}

LOST = rows.all_lost(
    {
        "tokens are those of the tokenizer's file": "resize_vocab split_special_tokens add_tokens add_special_tokens "
        "new_special_tokens_config",
        "DPO's reference is the model without its adapters": "ref_model ref_model_adapters ref_model_quantization_bit",
        "DPO's loss has no second term here": "pref_ftx pref_bco_weight",
        "that loss is not here": "use_dft_loss use_asft_loss use_eaft_loss",
        "no key of an optimizer's own has a place here": "optim_args optim_target_modules",
    }
)

LEFT = rows.left({
    "sequences are not divided over data ranks (context parallelism)": "sequence_parallel_mode",
    "the model's own config.json says all that is needed":
        "trust_remote_code model_revision cache_dir low_cpu_mem_usage",
    "tokens are those of the tokenizer's file": "use_fast_tokenizer init_special_tokens",
    "kernels follow from the device and the compiler":
        "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_liger_kernel use_v1_kernels use_reentrant_gc "
        "use_cce attn tf32 gradient_checkpointing_kwargs. gradient_checkpointing_kwargs torch_compile "
        "torch_compile_backend torch_compile_mode",
    "norms and logits are computed in float32": "upcast_layernorm upcast_lmhead_output",
    "adapters go on with `meshtrain.adopt import --adapter`": "adapter_folder create_new_adapter",
    "nothing is quantized here":
        "quantization_method quantization_type quantization_device_map double_quantization fp8_backend "
        "fp8_enable_fsdp_float8_all_gather",
    "there are no experts here": "moe_aux_loss_coef",
    "of pictures and sound nothing is here":
        "image_max_pixels image_min_pixels image_do_pan_and_scan image_resolution video_max_pixels video_min_pixels "
        "video_fps video_maxlen video_resolution crop_to_patches use_audio_in_video audio_sampling_rate media_dir "
        "freeze_vision_tower freeze_multi_modal_projector freeze_language_model train_mm_proj_only",
    "it is for inference, or export":
        "infer_backend infer_dtype offload_folder use_kv_cache use_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager "
        "export_size export_device export_quantization_bit export_quantization_dataset export_legacy_format "
        "export_hub_model_id predict_with_generate generation_max_length generation_num_beams generation_config "
        "do_predict max_new_tokens max_length top_p top_k temperature do_sample num_beams repetition_penalty "
        "length_penalty skip_special_tokens eval_num_beams",
    "nothing is fetched from, or sent to, a hub":
        "hf_hub_token ms_hub_token om_hub_token push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
        "hub_always_push hub_revision",
    "it only prints":
        "print_param_status plot_loss disable_tqdm log_level log_level_replica log_on_each_node logging_first_step "
        "logging_strategy logging_dir logging_nan_inf_filter include_num_input_tokens_seen include_tokens_per_second "
        "include_effective_tokens_per_second include_mfu skip_memory_metrics debug run_name project",
    "it belongs to a method that is not here":
        "pissa_iter pissa_convert loraplus_lr_embedding galore_target galore_rank galore_update_interval galore_scale "
        "galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj "
        "apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block "
        "badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose simpo_gamma "
        "kto_chosen_weight kto_rejected_weight asft_alpha eaft_alpha reward_model reward_model_adapters "
        "reward_model_quantization_bit reward_model_type ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
        "ppo_whiten_rewards oft_rank oft_block_size oft_target module_dropout use_mca",
    "the tokenizer's own chat template counts (data.template)": "template tool_format",
    "how examples are read ahead is arranged otherwise (data.prefetch)":
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size dataloader_num_workers "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last "
        "dataloader_multiprocessing_context dataloader_in_order streaming buffer_size tokenized_path "
        "remove_unused_columns group_by_length length_column_name data_shared_file_system accelerator_config. "
        "accelerator_config ignore_data_skip",
    "one seed says all (run.seed)": "data_seed full_determinism",
    "rows of the training batch's number are evaluated (eval.batches says how many batches)":
        "per_device_eval_batch_size eval_accumulation_steps do_eval eval_on_start eval_delay eval_on_each_dataset "
        "prediction_loss_only compute_accuracy include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval "
        "eval_do_concat_batches eval_use_gather_object",
    "the best is kept by its loss (checkpoint.keep_best), and --step best exports it":
        "load_best_model_at_end metric_for_best_model greater_is_better",
    "a run goes on from its newest checkpoint (checkpoint.resume: never starts anew)":
        "overwrite_output_dir restore_callback_states_from_checkpoint",
    "checkpoints hold the whole state, once":
        "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint",
    "how devices talk is arranged by mesh and launcher":
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
        "local_rank fsdp_config. fsdp_config parallelism_config. parallelism_config use_cpu auto_find_batch_size "
        "torch_empty_cache_steps ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers "
        "ray_init_kwargs. ray_init_kwargs resources_per_worker. resources_per_worker placement_strategy num_workers",
    "there is no SwanLab here (telemetry.trackers)":
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
        "swanlab_lark_webhook_url swanlab_lark_secret trackio_space_id",
    "a tracker's own variables say where rows go (telemetry.trackers)": "mlflow_tracking_uri wandb_project",
    "labels are those of the data": "label_names",
})  # fmt: skip

TABLE: Table = {**MODEL, **METHOD, **DATA, **TRAINING, **LOST, **LEFT}

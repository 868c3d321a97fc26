"""The line of a key: its meaning and bounds, what it follows from, what a resume does with a change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

# Numbers end up as int32 or float32: what these cannot hold is refused, and so is what float32 takes for zero.
LARGEST: dict[type, float] = {int: 2**31 - 1, float: 3.4028234663852886e38}
TINIEST = 2.0**-126
# What other frameworks call a key: PyTorch, Hugging Face's Trainer and models, Megatron-LM, DeepSpeed, nanoGPT,
# torchtitan, MaxText.
SYNONYMS = {
    word: path
    for path, words in {
        "train.global_batch_size": "batch_size bs train_batch_size per_device_train_batch_size micro_batch_size "
        "train_micro_batch_size_per_gpu local_batch_size",
        "train.sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length block_size context_length "
        "cutoff_len max_target_length",
        "train.steps": "max_steps num_steps total_steps max_iters train_iters training_steps num_train_steps "
        "iterations",
        "train.epochs": "num_epochs num_train_epochs max_epochs n_epochs",
        "train.loss_chunk": "chunked_loss",
        "run.seed": "random_seed manual_seed",
        "train.label_smoothing": "label_smoothing_factor",
        "optimizer.learning_rate": "lr learn_rate max_lr peak_lr base_lr",
        "optimizer.name": "optim optimizer_type optimizer_name",
        "optimizer.schedule": "lr_scheduler_type lr_schedule scheduler lr_scheduler lr_decay_style",
        "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_iters warmup_iters lr_warmup_steps",
        "optimizer.final_ratio": "min_lr min_lr_ratio",
        "optimizer.weight_decay": "wd",
        "optimizer.grad_clip": "max_grad_norm clip_grad gradient_clipping gradient_clip_val clip_norm max_norm",
        "optimizer.beta1": "adam_beta1 momentum betas",
        "optimizer.beta2": "adam_beta2",
        "optimizer.eps": "adam_epsilon adam_eps epsilon",
        "model.layers": "num_layers n_layers n_layer num_hidden_layers depth",
        "model.d_model": "hidden_size hidden_dim n_embd dim embed_dim emb_dim d_hidden model_dim",
        "model.heads": "num_heads n_heads n_head num_attention_heads",
        "model.kv_heads": "num_kv_heads n_kv_heads num_key_value_heads num_query_groups",
        "model.d_ff": "intermediate_size ffn_hidden_size ffn_dim mlp_dim d_mlp hidden_dim_ff",
        "model.vocab_size": "vocab n_vocab num_embeddings",
        "model.head_dim": "head_size d_head kv_channels",
        "model.max_positions": "max_position_embeddings n_positions",
        "model.moe.experts": "num_experts n_experts num_local_experts",
        "model.moe.top_k": "num_experts_per_tok moe_router_topk",
        "model.dropout": "hidden_dropout attention_dropout dropout_rate",
        "model.family": "arch architecture model_type",
        "model.weights": "model_name_or_path model_name pretrained",
        "mesh.tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size "
        "tensor_parallel_degree model_parallel",
        "mesh.pipeline": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size "
        "pipeline_parallel_degree stages",
        "mesh.data": "dp data_parallel data_parallel_size dp_size fsdp ddp data_parallel_shard_degree",
        "mesh.context": "cp context_parallel context_parallel_size cp_size context_parallel_degree",
        "mesh.expert": "ep expert_parallel expert_model_parallel_size ep_size expert_parallel_size",
        "parallel.zero_stage": "zero zero_optimization stage zero1 zero2 zero3",
        "parallel.sequence_parallel": "sp",
        "parallel.remat": "gradient_checkpointing activation_checkpointing recompute checkpoint_activations "
        "recompute_granularity",
        "parallel.microbatches": "gradient_accumulation_steps grad_accum accumulate_grad_batches "
        "gradient_accumulation num_microbatches accumulation_steps",
        "precision.compute": "dtype bf16 fp16 mixed_precision torch_dtype amp",
        "lora.rank": "lora_r lora_rank r",
        "lora.alpha": "lora_alpha",
        "lora.targets": "target_modules lora_target",
        "data.source": "dataset dataset_name dataset_path train_file data_path",
        "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path",
        "checkpoint.every": "save_steps save_interval save_every",
        "checkpoint.keep": "save_total_limit",
        "checkpoint.resume": "resume_from_checkpoint load_checkpoint",
        "eval.every": "eval_steps eval_interval",
        "eval.batches": "eval_iters",
        "eval.patience": "early_stopping_patience",
        "log.every": "logging_steps log_interval log_every_n_steps",
        "run.directory": "output_dir save_dir run_dir out_dir logdir",
        "telemetry.trackers": "report_to wandb",
        "train.objective": "task",
    }.items()
    for word in words.split()
}


def meant(name: str) -> str:
    """Returns the path of the key that another framework calls so, with or without a section; nothing if there is
    none.
    """
    return SYNONYMS.get(name.rpartition(".")[2].lower().replace("-", "_"), "")


class Resume(Enum):
    """How a resume takes a key that has another value than in the checkpoint."""

    FREE = "nothing: the key is of the command, not of the run"
    REPORTED = "it goes on, and says so"
    REFUSED = "it is refused, unless checkpoint.allow names the key"
    FUNCTION = (
        "another function goes on, and says so; back to the built-in part it is refused, unless "
        "checkpoint.allow names the key"
    )
    ADAPTERS = (
        "it is refused; weights alone are taken from where there are no adapters yet"
    )
    CONTENT = "it is refused, unless checkpoint.allow names the key; the digest of the data follows from it"
    TOKENS = (
        "it is refused, unless checkpoint.allow names the key; and with the weights alone too, which mean "
        "nothing for other tokens"
    )
    SHAPE = "it is refused, with the weights alone too: what they are, and what the model computes with them"
    SIZE = "it is refused; but the weights alone are taken as far as they fit, if checkpoint.allow names the key"


class Followed(str):
    """A text that follows from other keys and was named by nobody: who runs the config may choose again
    (`follow.as_run_on`).
    """


@dataclass(frozen=True)
class Key:
    """The line of a key, besides its type."""

    default: Any
    doc: str
    # Bounds of a number, or of each number of a list; without `most` it is that of LARGEST.
    least: float | None = None
    most: float | None = None
    above: float | None = None
    # What a number counts, for the sentence that refuses one: in seconds (3 µs are 3e-06).
    unit: str = ""
    # It may name a file: see `meshtrain.config.places`.
    path: bool = False
    # The legal texts, looked at when a value is read: more of them may be registered from outside.
    one_of: Mapping[str, Any] | None = None
    # Where the default stands, the value follows from the config; ConfigError if it does not.
    follows: Callable[[Any], Any] | None = None
    resume: Resume = Resume.REPORTED
    # Whether anything depends on the key, in a config.
    counts: Callable[[Any], bool] = lambda config: True

    @property
    def null(self) -> bool:
        """Says whether null may stand for a value that follows from other keys; a resolved config has none."""
        return self.default is None and self.follows is not None


def key(default: Any, doc: str, **rules: Any) -> Any:
    """Declares a key, with `rules` as in `Key`. A type with None has null as a value of its own."""
    return field(default=default, metadata={"key": Key(default, doc, **rules)})


def keys(kind: type) -> dict[str, Key]:
    """Returns the keys of a section by name; of sections in a config by path, as in model.layers."""
    entries: dict[str, Key] = {}
    for declared in fields(kind):
        if isinstance(declared.type, type) and is_dataclass(declared.type):
            entries |= {
                f"{declared.name}.{name}": rules
                for name, rules in keys(declared.type).items()
            }
        elif "key" in declared.metadata:
            entries[declared.name] = declared.metadata["key"]
    return entries


def known(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Returns the values of a config of another version, by section, whose keys this one's `kind` has too."""
    entries: dict[str, Any] = {}
    for declared in fields(kind):
        if declared.name in values:
            value = values[declared.name]
            of_section = isinstance(declared.type, type) and is_dataclass(declared.type)
            if of_section:
                value = known(value, declared.type)  # type: ignore[arg-type]
            entries[declared.name] = value
    return entries

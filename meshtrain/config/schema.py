"""Every key of the configuration in one line: its type, its default, and what `key` takes besides.

Sections with a file of their own: `data.images` (`images`), `mesh`, `model` and `lora` (`model`), `parallel.reduce` and
`parallel.sync` (`reduce`), `telemetry`. Nothing here reads a file or touches a device.
"""

from dataclasses import dataclass, field
from typing import Literal

from meshtrain.config import auto
from meshtrain.config.images import ImagesConfig
from meshtrain.config.key import Resume, key
from meshtrain.config.mesh import MeshConfig
from meshtrain.config.model import LoraConfig, ModelConfig, positions_of
from meshtrain.config.reduce import ReduceConfig, SyncConfig
from meshtrain.config.rl import RlConfig
from meshtrain.config.telemetry import TelemetryConfig
from meshtrain.families import FAMILIES
from meshtrain.learning_rates import LEARNING_RATES
from meshtrain.optimizers import OPTIMIZERS
from meshtrain.registry import Shown
from meshtrain.schedule.generators import SCHEDULES, has_table

FREE = Resume.FREE
REFUSED = Resume.REFUSED
CONTENT = Resume.CONTENT
TOKENS = Resume.TOKENS

# JAX starts so many CPU devices in 5 s; 4096 take more than a minute
MOST_FAKE_DEVICES = 1024


# A key keeps together what it says.
# fmt: off
@dataclass(frozen=True)
class RunConfig:
    directory: str = key("runs/default", "where config.yaml, metrics.jsonl and checkpoints/ are written", resume=FREE)
    # JAX's keys take 32 bits of it
    seed: int = key(
        0, "the one seed: initialisation, dropout and the order of the data follow from it",
        least=0, most=2**32 - 1, resume=REFUSED
    )
    fake_devices: int = key(
        0, "CPU devices to fake when there is no accelerator (XLA_FLAGS wins); 0: as many as the mesh needs",
        least=0, most=MOST_FAKE_DEVICES
    )
    imports: tuple[str, ...] = key(
        (), "Python files and modules that register families, optimizers, schedules, sources, or define functions "
            "that keys name; a file is "
        "looked for beside the config and copied into the run directory", resume=FREE
    )
    callbacks: tuple[str, ...] = key(
        (), "functions of run.imports, each as MODULE:FUNCTION, that every process calls with the metrics of each "
            "step",
        resume=FREE
    )


# What remat: names may keep or offload, in the order in which a layer makes it; and what remat: selective keeps of it.
ACTIVATIONS = ("qkv", "attention", "attention_out", "dispatched", "mlp_in", "mlp_hidden", "mlp_out")
SELECTIVE = ("qkv", "attention", "attention_out", "mlp_in", "mlp_out")


@dataclass(frozen=True)
class ExpertsConfig:
    dispatch: Literal["auto", "all_gather", "all_to_all"] = key(
        "auto", "how rows come to their experts' ranks, and back. all_gather: all rows to all ranks, and a "
                "reduce-scatter; all_to_all: each to where "
        "it is computed; auto: which sends less",
        follows=auto.dispatch, counts=lambda c: c.mesh.expert > 1
    )
    capacity: float | None = key(
        None, "rows that a rank has room for, over those of an even load: others are dropped, and counted; null: room "
              "for 1.25 times, and what is beyond takes further rounds", above=0.0
    )
    ranks_per_node: int | None = key(
        None, "all_to_all: ranks of one node among those that share experts. Rows are gathered from the ranks of the "
              "same number in the other nodes, each once, and go to their experts from there; null: each row goes to "
              "each of its experts", least=1, counts=lambda c: c.mesh.expert > 1
    )

    @property
    def room(self) -> float:
        """Rows that a rank has room for, over those of an even load: in a round where nothing is dropped."""
        return 1.25 if self.capacity is None else self.capacity


@dataclass(frozen=True)
class ParallelConfig:
    zero_stage: Literal[0, 1, 2, 3] = key(
        1, "what is sharded over data: 0 nothing, 1 optimizer state and masters, 2 also gradients, 3 also parameters"
    )
    zero_hold: bool = key(
        False, "ZeRO-2/3 with several microbatches: hold full gradients (2, which is stage 1 then) or gathered "
               "weights (3) over the whole "
        "step; more memory, and traffic that does not grow with the microbatches"
    )
    prefetch: Literal[1] = key(
        1, "layers whose weights ZeRO-3 prefetches: one, the layer that computes; more costs more in copies "
           "than it hides"
    )
    sequence_parallel: bool = key(False, "split activations between the blocks over tensor along the sequence "
                                         "(Korthikanti et al.)")
    context_strategy: Literal["auto", "all_gather", "ring", "ulysses"] = key(
        "auto",
        "attention across mesh.context. ring: keys and values travel round, overlapped with compute; all_gather: they "
        "are gathered, which supports windows too; ulysses: tokens are swapped for heads, which mesh.context must "
        "divide; auto: the strategy with the shortest planned time per layer",
        follows=auto.context_strategy, counts=lambda c: c.mesh.context > 1
    )
    remat: Literal["none", "selective", "full", "dots", "names"] = key(
        "none",
        "what the backward pass recomputes: nothing, only what is cheap (norms, activations, scores of an attention "
        "hook), all of a layer, all "
        "but matmul outputs, or all but the names in remat_keep"
    )
    remat_keep: tuple[str, ...] = key((), "remat: names keeps these activations on the device: "
                                          f"{', '.join(ACTIVATIONS)}")
    remat_offload: tuple[str, ...] = key((), "remat: names keeps these activations in host memory")
    offload_optimizer: bool = key(False, "keep optimizer state in host memory between steps, where the backend can")
    microbatches: int = key(1, "pieces into which each data rank's share of the batch is cut; gradient accumulation "
                               "when pipeline is 1", least=1)
    # Follows before the schedule, which follows from it.
    virtual_stages: int = key(
        1, "model chunks per stage, for the interleaved schedules; 1: as many as the schedule has, under auto the "
           "largest number, up to 8, that divides the layers of a stage",
        least=1, follows=auto.virtual_stages, counts=lambda c: c.mesh.pipeline > 1
    )
    schedule: str = key(
        auto.AUTO,
        f"pipeline schedule: {', '.join(SCHEDULES)}, or the path of a .csv table; auto chooses for you: interleaved, "
        "1f1b with one chunk per stage, or a paired schedule where the plan is clearly faster; with one stage only "
        "paired has an effect",
        path=True, follows=auto.schedule,
        counts=lambda c: has_table(c.parallel.schedule, c.mesh.pipeline, c.parallel.microbatches)
    )
    layer_split: tuple[int, ...] | None = key(None, "layers of each virtual stage in model order; null: as even as "
                                                    "can be", least=0)
    vocab: Literal["spread", "edge"] = key(
        "spread",
        "spread: embedding and head are sharded over pipeline x tensor and all stages share their work; edge: over "
        "tensor alone, on the first and last stage"
    )
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)

    @property
    def names_kept(self) -> tuple[str, ...]:
        """The activations that remat: names or selective keeps on the device."""
        return SELECTIVE if self.remat == "selective" else self.remat_keep


# Where Megatron-LM begins. One token's share of a batch of 4 M still gets 2^10 times its gradient there: more would
# only take longer to come down from, and end at infinity.
LARGEST_LOSS_SCALE = 2.0**32


RECIPES = ("rowwise", "tensorwise", "blockwise")  # of float8, see `model.float8`
FLOAT8_BLOCK = 128  # rows, and columns, that share a scale where float8 is blockwise


def _uses_float8(config: "Config") -> bool:
    return config.precision.matmul == "float8"


@dataclass(frozen=True)
class PrecisionConfig:
    compute: Literal["float32", "bfloat16", "float16"] = key("float32", "dtype of weights and activations in the "
                                                                        "step; masters stay float32")
    reduce: Literal["float32", "bfloat16"] = key("float32", "dtype in which gradients are summed over data")
    gradient_sums: Literal["float32", "bfloat16"] = key(
        "float32", "dtype in which a data rank sums its gradients over the microbatches",
        counts=lambda c: c.parallel.microbatches > 1 or c.mesh.pipeline > 1
    )
    matmul: str = key(
        "compute", "the products of the layers: compute, in that dtype; float8, of operands that are rounded to 8 "
                   "bits, experts' multiplied "
        "in the compute dtype. Head, embedding, router, norms and adapters stay as they are"
    )
    float8_recipe: str = key(
        "rowwise", "numbers that share a scale: rowwise, a row or column of what is summed over; tensorwise, all on a "
                   "device, so that losses depend "
        "on the mesh and on microbatches; blockwise, 128 of a row and 128 x 128 of a weight, multiplied in the "
        "compute dtype", counts=_uses_float8)
    float8_wgrad: Literal["compute", "float8"] = key(
        "compute", "what the gradients of weights are multiplied in",
        counts=_uses_float8
    )
    float8_skip: tuple[int, ...] = key(
        (1, 1), "how many of the first and of the last layers stay in the compute dtype",
        least=0, counts=_uses_float8
    )
    float8_gather: bool = key(
        True, "gather what is rounded: over tensor with sequence_parallel, and weights over data, with blockwise those "
              "whose shards have blocks whole", counts=_uses_float8)
    float8_frozen: bool = key(
        True, "hold frozen weights of the layers' products in float8, half their bytes, those of skipped layers too; "
              "they are saved as what they "
        "were rounded to", counts=_uses_float8)
    loss_scale: float = key(
        65536.0, "float16: initial loss scale; it never leaves these bounds",
        least=1.0, most=LARGEST_LOSS_SCALE
    )
    loss_scale_window: int = key(1000, "float16: good steps after which the scale is doubled", least=1)
    loss_scale_hysteresis: int = key(
        2, "float16: which overflow since the scale last grew, in a row or not, halves it first; every later one does "
           "too",
        least=1
    )


@dataclass(frozen=True)
class DataConfig:
    source: str = key(
        "stdlib",
        "stdlib (the source of Python's standard library), a file or directory of text, prepared shards, mixture, or "
        "synthetic "
        "(random tokens, for benchmarks); text and shards also by address (s3://BUCKET/PREFIX, gs://); "
        "hf:NAME[:SPLIT[:COLUMN]], a dataset of Hugging Face's, of the hub or a directory; of images a "
        "folder with a folder for each class, arrays (.npz, or a folder "
        "of .npy), digits "
        "(scikit-learn's, 8 x 8), or synthetic",
        path=True, resume=CONTENT
    )
    tokenizer: str = key("byte", "byte, or the path of a tokenizer.json", path=True, resume=TOKENS)
    begin: str | None = key(
        None, "the token before each document, and before each prompt that no chat template makes, or none; null: as "
              "the files of the "
        "tokenizer say", resume=CONTENT
    )
    end: str | None = key(
        None, "the token behind each document; null: as the files of the tokenizer say",
        resume=CONTENT
    )
    mixture: tuple[str, ...] = key(
        (), "source: mixture draws from these sources (each stdlib, text or prepared shards)",
        path=True, resume=CONTENT
    )
    weights: tuple[float, ...] = key(
        (), "share of each source of the mixture, in sequences (batching grouped and budget: in batches); "
        "they are divided by their sum and rounded to 1/4096",
        above=0.0, resume=REFUSED
    )
    batching: Literal["window", "packed", "grouped", "budget"] = key(
        "window",
        "window: sequences that follow one another in the text; packed: whole documents side by side, attention and "
        "loss kept within each; "
        "grouped: documents of about equal length together, padded; budget: the same with more rows the shorter they "
        "are; conversations "
        "are never cut like window, so there packed stands for it",
        follows=lambda c: "packed" if c.data.format in ("chat", "pairs") else "window", resume=REFUSED
    )
    last: Literal["drop", "pad"] = key(
        "drop", "what an epoch does with a last batch (or sequence) that is not full: leave it out, unless there is "
                "no other, or pad it; "
        "of what is held out none is left out", resume=REFUSED
    )
    lengths: int = key(
        8, "grouped, budget: sequence lengths to pad to, so the shapes to compile",
        least=1, most=64, resume=REFUSED
    )
    length_multiple: int = key(16, "grouped, budget: the lengths are multiples of this", least=1, resume=REFUSED)
    rows_multiple: int = key(
        None, "budget: the rows of a batch are a multiple of this; null: train.global_batch_size",
        least=1, follows=lambda c: c.train.global_batch_size, resume=REFUSED
    )
    validation: float | None = key(
        None, "share of the documents held out for evaluation, of conversations one at least; null: 0.01 (stdlib: "
              "0.05), or what prepared shards were made with",
        least=0.0, most=0.5, resume=CONTENT
    )
    validation_source: str | None = key(None, "other text for validation, instead of a share of the source", path=True)
    text_field: str = key("text", "the field of a JSON Lines record that holds its text", resume=CONTENT)
    bad_documents: Literal["skip", "refuse"] = key(
        "skip",
        "a document that is empty, not UTF-8 or without text, met while preparing: name it in a log and skip it, or "
        "refuse",
        resume=CONTENT
    )
    verify: bool = key(
        True, "compare the digests of the shards with their manifest on opening (about 1 GB/s a core), and bit by bit "
              "while they are read; "
        "sizes, and files that change meanwhile, always are"
    )
    cache_gib: float = key(
        64.0, "GiB on this machine for what is read from object stores (s3://, gs://): shards by their digests, "
              "weights; what was used longest ago goes first", above=0.0, resume=FREE
    )
    prefetch: int = key(2, "batches that are read and placed on the devices ahead of the step", least=1)
    format: Literal["text", "chat", "pairs", "images"] = key(
        "text",
        "text: every token is learned; chat: conversations (OpenAI messages, ShareGPT, Alpaca), of which the answers "
        "are learned; pairs: "
        "a chosen and a rejected answer to each prompt, for train.objective: dpo; images: with a class each, what a "
        "family of images reads",
        follows=lambda c: "images" if FAMILIES[c.model.family].images else "text", resume=CONTENT
    )
    template: str | None = key(
        None, "format chat, pairs: a chat template (Jinja), or the tokenizer_config.json that holds one; null: the "
              "one beside data.tokenizer",
        path=True, resume=CONTENT
    )
    images: ImagesConfig = field(default_factory=ImagesConfig)


@dataclass(frozen=True)
class TrainConfig:
    steps: int = key(100, "optimizer steps of the whole run", least=1)
    global_batch_size: int = key(16, "sequences a step, over all devices", least=1, resume=REFUSED)
    uneven_batch: Literal["refuse", "pad"] = key(
        "refuse",
        "what to do if mesh.data x parallel.microbatches does not divide the batch: refuse it, or pad it at its end "
        "with rows of weight 0; losses and gradients stay those of the batch"
    )
    sequence_length: int = key(
        256, "tokens a sequence; of images it follows: the positions of one",
        least=1, follows=lambda c: positions_of(c.model) or 256, resume=REFUSED
    )
    label_smoothing: float = key(
        0.0, "share of the target probability spread evenly over the vocabulary",
        least=0.0, most=0.99
    )
    z_loss: float = key(
        0.0, "weight of log(Z)^2, which keeps the logits' normaliser near one (PaLM, section 5)",
        least=0.0
    )
    loss: str | None = key(None, "a function in the place of the built-in loss, as MODULE:NAME of run.imports "
                                 "(model.hooks)", resume=Resume.FUNCTION)
    loss_chunk: int | Literal["auto"] = key(
        "auto", "tokens whose logits are alive at once, for losses and gradients. auto: all of a microbatch, or 2,048 "
                "where they would take more "
        "than 4 GiB a device",
        least=1, counts=lambda c: not FAMILIES[c.model.family].images
    )
    epochs: float = key(
        0.0, "passes over the data, from which train.steps then follows; 0: train.steps counts",
        least=0.0
    )
    trainable: tuple[str, ...] = key(
        (), "weights that are trained, by name or pattern (blocks.attention.*), the others frozen; empty: all, or "
            "with lora.rank the "
        "adapters alone",
        resume=REFUSED
    )
    objective: Literal["next_token", "dpo", "grpo", "classify"] = key(
        "next_token", "next_token: cross-entropy; dpo: direct preference optimisation (Rafailov et al. 2023), the "
                      "model without its adapters as reference; grpo: reinforcement learning from the model's own "
                      "answers, see rl; classify: cross-entropy of an image's class",
        follows=lambda c: "classify" if FAMILIES[c.model.family].images else "next_token", resume=REFUSED
    )
    gc_every: int = key(
        100, "steps between two collections of Python's garbage, which all processes make at the same step, so that "
             "none keeps the others "
        "waiting; 0: each whenever Python thinks fit",
        least=0, resume=FREE
    )
    dpo_beta: float = key(0.1, "objective dpo: how strongly the reference holds", above=0.0)


@dataclass(frozen=True)
class TransferConfig:
    width: int = key(0, "model.d_model of the model whose rates these are; 0: this one's", least=0, resume=REFUSED)
    depth: int = key(0, "its model.layers; 0: as many as here", least=0, resume=REFUSED)
    head_dim: int = key(0, "its model.head_dim; 0: as here", least=0, resume=REFUSED)

    def __bool__(self) -> bool:
        return bool(self.width or self.depth or self.head_dim)


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = key("adamw", "the Optax optimizer", one_of=OPTIMIZERS, resume=REFUSED)
    learning_rate: float = key(1e-3, "peak learning rate", above=0.0)
    schedule: str = key(
        "cosine", "shape of the learning rate after the warm-up: cosine and linear fall to final_ratio, constant "
                  "stays, wsd (warmup-stable-decay) stays, "
        "then falls over the last decay_ratio of the steps; or one registered from outside", one_of=LEARNING_RATES
    )
    warmup_steps: int = key(10, "steps of linear warm-up, from the first rung to the peak", least=0)
    final_ratio: float = key(
        0.1, "learning rate at the last step over the peak (cosine, linear, wsd)",
        least=0.0, most=1.0
    )
    decay_ratio: float = key(
        0.1, "schedule wsd: share of all steps, the last ones, in which the rate falls",
        above=0.0, most=1.0
    )
    weight_decay: float = key(0.1, "decoupled weight decay", least=0.0)
    decay_norms: bool = key(False, "also decay norms and biases")
    grad_clip: float = key(1.0, "largest global gradient norm; 0: no clipping", least=0.0)
    beta1: float = key(0.9, "first-moment decay (adamw, lion), momentum (sgd, muon)", least=0.0, most=0.99999)
    beta2: float = key(0.95, "second-moment decay (adamw), momentum decay (lion)", least=0.0, most=0.99999)
    eps: float = key(1e-8, "added to the root of the second moment", above=0.0)
    qk_clip: float = key(
        0.0, "largest attention logit of a head: beyond it the weights of its queries and keys shrink after a step "
             "(QK-clip: Kimi K2 takes 100); 0: no clipping", least=0.0
    )
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = key(0, "steps between checkpoints, before each of which all copies of the state are compared; 0: "
                        "only at the end", least=0)
    keep: int = key(3, "newest checkpoints kept", least=1)
    keep_best: int = key(
        1, "checkpoints kept for their eval loss, the lowest ones; 0: none, else each evaluation with the lowest loss "
           "so far is followed by a "
        "save", least=0
    )
    keep_every: int = key(0, "checkpoints at multiples of this step are kept for ever; 0: none are", least=0)
    resume: str = key(
        "auto",
        "auto: go on from the newest intact checkpoint of the run directory; never; or the path of another run or of "
        "one "
        "checkpoint, under its step's number or a name that is none: where this one starts as long as it has no "
        "checkpoint of its own",
        path=True, resume=FREE
    )
    directory: str | None = key(
        None, "s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, where checkpoints are written and restored from; null: in "
              "the run directory, where lock, metrics and a supervisor's records are either way", resume=FREE
    )
    weights_only: bool = key(False, "resume: PATH takes the weights alone; step, optimizer state and data position "
                                    "start anew", resume=FREE)
    allow: tuple[str, ...] = key(
        (), "keys that may differ from the checkpoint's although that is refused otherwise, such as data.source; "
        "with weights_only also model.layers and model.vocab_size: what the checkpoint lacks stays as initialised",
        resume=FREE
    )
    on_failed_save: Literal["continue", "stop"] = key(
        "continue",
        "a checkpoint cannot be written (disk full, read-only): say so and go on to the next one, or stop the run. "
        "The one before stays intact; a run whose last checkpoint failed ends with an error either way"
    )


@dataclass(frozen=True)
class EvalConfig:
    every: int = key(0, "steps between evaluations on the validation data; 0: never", least=0)
    batches: int = key(8, "batches of one evaluation; where fewer are held out, all of them once (of a mixture until "
                          "a source comes round)", least=1)
    samples: int = key(0, "texts that the model goes on with at each evaluation, from the begins of validation rows; "
                          "they are in its row, in monitor and report", least=0, most=64)
    patience: int = key(0, "evaluations in a row without a lower loss after which the run ends, done; 0: it takes all "
                           "its steps", least=0)


@dataclass(frozen=True)
class LogConfig:
    every: int = key(1, "steps between rows of metrics.jsonl", least=1)
    batches: bool = key(
        False, "under `meshtrain.survive` every process writes checksums of the rows that it reads, to compare one "
               "run's batches with another's",
        resume=FREE
    )


@dataclass(frozen=True)
class SurviveConfig:
    wanted: int = key(
        1, "nodes that the mesh is for, one process each; a run begins when so many are there",
        least=1, most=65536, resume=FREE
    )
    least: int = key(1, "fewest nodes to go on with", least=1, most=65536, resume=FREE)
    most: int = key(
        None, "most nodes to use: the data axis grows beyond the mesh's where they return; null: wanted, others are "
              "spares",
        least=1, most=65536, follows=lambda c: c.survive.wanted, resume=FREE
    )
    join_timeout: float = key(
        300.0, "seconds to wait for `wanted` nodes before going on with at least `least`",
        least=0.0, resume=FREE
    )
    step_timeout: float = key(
        0.0, "seconds without a sign of progress within a step that are a hang; 0: 10 times the median step, at least "
             "60",
        least=0.0, resume=FREE
    )
    node_timeout: float = key(20.0, "seconds without a sign of life after which a node is lost, or a frozen process "
                                    "ended", least=1.0, resume=FREE)
    restarts: int = key(
        20, "restarts for faults that a run may take in 24 hours before it is given up",
        least=0, resume=FREE
    )
    inject: tuple[str, ...] = key((), "faults to inject, KIND@STEP:RANK each; `meshtrain survive inject --list` has "
                                      "the kinds", resume=FREE)


@dataclass(frozen=True, repr=False)
class Config(Shown):
    """The whole configuration; `load.load` makes one from YAML and overrides."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    survive: SurviveConfig = field(default_factory=SurviveConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rl: RlConfig = field(default_factory=RlConfig)

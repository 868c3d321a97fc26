"""Keys of ours that follow from several of theirs together: each function takes its facts and puts what they come
to.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshtrain.adopt.configs.key_rows import FactValue, KeyFacts, contradiction
from meshtrain.errors import ConfigError, short

MEDIA = ("images", "videos", "audios")
# In their dataset_dir: what file a dataset's name stands for
INFO = "dataset_info.json"
# The columns that a record has by its format, which need no translation here.
COLUMNS = {
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "messages",
    "conversations",
    "chosen",
    "rejected",
    "tools",
    "prompt",
    "query",
    "response",
    "text",
}


def follow(facts: KeyFacts, devices: int | None, steps: int | None, near: Path) -> None:
    """Puts all that follows. `near`: a directory to look for their files in, and in those above it."""
    for key in ("do_predict", "do_eval"):
        given = facts.keys.get(key)
        if given is not None and given.value is True and "do_train" not in facts.keys:
            raise given.refused("without do_train this file does not train")
    _mesh(facts, devices)
    _precision(facts)
    _optimizer(facts)
    _steps(facts, steps)
    _checkpoints(facts)
    _tuning(facts)
    _data(facts, near)
    _evaluation(facts)
    if name := facts.take("model"):
        facts.put("model.weights", name)
        facts.put("data.tokenizer", f"{name.rstrip('/')}/tokenizer.json")
        if not Path(name).expanduser().is_dir():
            facts.notes.append(
                f"model.weights {short(name)} is not a directory here: download it, and say where it is."
            )
    if trackers := [
        name for name in ("tensorboard", "wandb") if facts.take(f"tracker {name}")
    ]:
        facts.put(
            "telemetry.trackers",
            sorted({*trackers, *(facts.get("telemetry.trackers") or [])}),
        )


def _mesh(facts: KeyFacts, devices: int | None) -> None:
    """Their devices are data ranks, but for DeepSpeed's AutoTP; accumulation is in microbatches here.

    train_batch_size = rows a device x accumulation x data ranks; two of them say the third (DeepSpeed,
    docs/_pages/config-json.md).
    """
    sizes = ("rows a step", "rows a device", "accumulation")
    tensor = facts.get("mesh.tensor") or 1
    if devices is not None and devices % tensor:
        source = facts.source("mesh.tensor")
        raise ConfigError(
            f"--devices {devices} does not divide into {source}; give a multiple of it."
        )
    for path in sizes:
        if (given := facts.given(path)) and facts.get(path) < 1:
            raise given.refused("it must be at least 1")
    total, rows, accumulation = map(facts.stated, sizes)
    if devices is not None:
        ranks = devices // tensor
    elif total and rows and accumulation and total % (rows * accumulation) == 0:
        ranks = total // (rows * accumulation)
    else:
        ranks = 1
        facts.notes.append(
            "--devices is not given, and the files do not tell: this is for one device."
        )
    if total:
        product = math.prod(filter(None, (rows, accumulation, ranks)))
        if total % product or (rows and accumulation and total != product):
            sources = [facts.source(path) for path in sizes[1:] if facts.given(path)]
            parts = " x ".join([*sources, f"{ranks} data rank{'s' * (ranks > 1)}"])
            ending = (
                f", but {parts} is {product}"
                if len(sources) == 2
                else f" is not a multiple of {parts}, {product}"
            )
            raise ConfigError(f"{facts.source('rows a step')}{ending}; let them agree.")
        if rows is None:
            rows = total // product
            accumulation = accumulation or 1
        elif accumulation is None:
            accumulation = total // product
    rows = rows or facts.get("rows a device") or 1
    accumulation = accumulation or facts.get("accumulation") or 1
    for path in sizes:
        facts.take(path)
    facts.put("mesh.data", ranks)
    facts.put("mesh.tensor", tensor)
    facts.put("parallel.microbatches", accumulation)
    facts.put("train.global_batch_size", rows * accumulation * ranks)


def _precision(facts: KeyFacts) -> None:
    on = [
        given
        for name in ("fp16", "bf16", "pure bf16")
        if facts.get(name) and (given := facts.given(name))
    ]
    half, *brain = [facts.take(name) for name in ("fp16", "bf16", "pure bf16")]
    if half and any(brain):
        raise contradiction(on[0], on[1], "precision.compute")
    facts.put(
        "precision.compute",
        "bfloat16" if any(brain) else "float16" if half else "float32",
    )
    if not half:
        for key in ("loss_scale", "loss_scale_window", "loss_scale_hysteresis"):
            facts.drop(f"precision.{key}", "it counts with float16 alone")


def _optimizer(facts: KeyFacts) -> None:
    """One key, beta1, is Adam's first and the momentum of others; and DeepSpeed's schedules and optimizers have values
    of their own.
    """
    name = facts.get("optimizer.name")
    usual = {"sgd": 0.0, "muon": 0.95}.get(name)
    if usual is None:
        facts.drop("momentum", "sgd and muon alone have a momentum")
    else:
        momentum = facts.take("momentum")
        facts.drop("optimizer.beta1", f"beta1 is the momentum of {name} here")
        facts.put("optimizer.beta1", usual if momentum is None else momentum)
    llama_factory = facts.get("stage") is not None
    if not llama_factory and any(key.startswith("optimizer.") for key in facts.keys):
        facts.values.setdefault("optimizer.beta1", FactValue(0.9))
        facts.values.setdefault(
            "optimizer.beta2", FactValue(0.99 if name == "lion" else 0.999)
        )
    elif not llama_factory:
        facts.notes.append(
            "no file has an optimizer, which its script then makes: set the section optimizer."
        )
    peak = facts.take("usual peak")
    schedule = facts.keys.get("scheduler.type")
    if peak and schedule and "scheduler.params.warmup_max_lr" not in facts.keys:
        facts.drop(
            "optimizer.learning_rate",
            f"{schedule.text} rises to {peak:g} unless warmup_max_lr is given",
        )
        facts.put("optimizer.learning_rate", peak)
    rises = facts.get("warm-up steps") or facts.get("warm-up share")
    if schedule and rises and "scheduler.params.warmup_type" not in facts.keys:
        facts.differs.append(
            (
                schedule,
                "the warm-up is linear here, theirs logarithmic unless warmup_type is linear",
            )
        )
    if not llama_factory and not any(
        key.startswith("scheduler.") for key in facts.keys
    ):
        facts.put("optimizer.schedule", "constant")
        facts.notes.append(
            "no file has a scheduler, so the rate is constant here; the script may have set one."
        )


def _steps(facts: KeyFacts, steps: int | None) -> None:
    """max_steps counts before epochs; a share of the steps becomes a number where that of the steps is known."""
    if facts.get("train.steps"):
        facts.drop("train.epochs", f"{facts.source('train.steps')} counts")
        steps = facts.get("train.steps")
    rate = facts.get("optimizer.learning_rate")
    final = facts.take("final rate")
    if final is not None and rate:
        facts.put("optimizer.final_ratio", float(f"{final / rate:.6g}"))
    share = facts.get("warm-up share")
    given = facts.given("warm-up share")
    warmup = facts.stated("warm-up steps")
    if facts.take("no warm-up"):
        for path in ("warm-up share", "warm-up steps"):
            facts.drop(path, "the schedule constant has no warm-up")
        warmup = 0
    elif warmup:
        facts.drop("warm-up share", f"{facts.source('warm-up steps')} counts")
    elif share and steps:
        warmup = math.ceil(share * steps)
    elif share and given:
        facts.notes.append(
            f"{given.text} ({given.where}) is a share of steps that follow from the data: set optimizer.warmup_steps, "
            "or give --steps."
        )
    usual = facts.take("warm-up steps")
    _ = facts.take("warm-up share")
    if facts.get("optimizer.schedule"):
        facts.put("optimizer.warmup_steps", (usual or 0) if warmup is None else warmup)
    if facts.get("optimizer.schedule") == "wsd":
        _wsd(facts, steps)


def _wsd(facts: KeyFacts, steps: int | None) -> None:
    """Converts warmup-stable-decay: in theirs a third of the steps after the warm-up is stable. The rate falls to 0 in
    the others, unless the schedule's arguments say otherwise.
    """
    given = facts.given("optimizer.schedule")
    stable, falls, shape = (
        facts.take(name) for name in ("stable steps", "decay steps", "decay type")
    )
    if facts.get("optimizer.final_ratio") is None:
        facts.put("optimizer.final_ratio", 0.0)
    if given and shape != "linear":
        facts.differs.append(
            (given, f"the rate falls along a line here, theirs by {shape or 'cosine'}")
        )
    warmup = facts.get("optimizer.warmup_steps")
    if not steps:
        facts.put("optimizer.decay_ratio", 0.666667)
        facts.notes.append(
            "optimizer.decay_ratio is the share of all steps in which the rate falls; give --steps, or set it."
        )
        return
    rest = max(steps - warmup, 0)
    stable, falls = (
        usual if n is None else n
        for n, usual in ((stable, rest // 3), (falls, rest - rest // 3))
    )
    if given and stable + falls != rest:
        facts.differs.append(
            (
                given,
                f"the rate falls in the last {falls} steps here, theirs after {stable} at the peak",
            )
        )
    facts.put("optimizer.decay_ratio", float(f"{min(falls, steps) / steps:.6g}"))


def _checkpoints(facts: KeyFacts) -> None:
    by = facts.get("saved by")
    source = facts.source("saved by")
    facts.take("saved by")
    if by in ("epoch", "best"):
        facts.notes.append(
            f"{source}: checkpoint.every counts steps, set it; at the end one is written."
        )
    if by in ("no", "epoch", "best"):
        facts.drop("checkpoint.every", source)
    elif facts.get("tuned") and "checkpoint.every" not in facts.values:
        facts.put("checkpoint.every", 500)


def _tuning(facts: KeyFacts) -> None:
    tuned = facts.take("tuned")
    stage = facts.given("train.objective")
    if stage and facts.get("train.objective") == "dpo" and tuned == "full":
        raise stage.refused(
            "the reference is the model without its adapters here, so finetuning_type must be lora"
        )
    if tuned != "lora":
        for path in (
            "lora.rank",
            "lora.alpha",
            "lora.targets",
            "lora.dropout",
            "lora.rslora",
            "beside adapters",
        ):
            facts.drop(path, f"finetuning_type is {tuned}")
    if beside := facts.take("beside adapters"):
        facts.put("train.trainable", beside)
    if tuned == "freeze":
        given = facts.given("frozen but")
        names = facts.take("frozen but")
        more = facts.take("frozen but also")
        if not names:
            raise ConfigError(
                "finetuning_type is freeze, which trains all of some layers unless freeze_trainable_modules names "
                "modules; "
                "train.trainable names weights over all layers."
            )
        facts.put("train.trainable", [*names, *(more or [])])
        if given and "freeze_trainable_layers" not in facts.keys:
            why = (
                "these are trained in all layers here, in theirs in the last 2 unless freeze_trainable_layers says "
                "more"
            )
            facts.differs.append((given, why))
    for path in ("frozen but", "frozen but also"):
        facts.drop(path, f"finetuning_type is {tuned}")


def _data(facts: KeyFacts, near: Path) -> None:
    stage = facts.take("stage")
    given = facts.given("packing")
    packing = facts.take("packing")
    if not facts.take("neat") and packing and given and stage == "sft":
        why = "examples that are packed together do not see each other here, as with neat_packing"
        facts.differs.append((given, why))
    if stage == "sft":
        # Unpacked a row is one example, as theirs is, so that batches and epochs keep their meaning.
        facts.put("data.batching", "packed" if packing else "grouped")
    elif stage == "pt":
        facts.put("data.batching", "packed" if packing is False else "window")
    elif given:
        facts.left.append((given, "pairs are packed"))
    names = facts.take("datasets") or []
    directory = facts.take("dataset_dir")
    validation = facts.take("eval datasets") or []
    shares = facts.take("shares")
    if not names and not validation:
        return
    find = _finder(facts, directory or "data", near)
    paths = [find(name) for name in names]
    if len(paths) == 1:
        facts.put("data.source", paths[0])
    elif paths:
        facts.put("data.source", "mixture")
        facts.put("data.mixture", paths)
        facts.put(
            "data.weights",
            shares
            if shares and len(shares) == len(paths)
            else _weigh_by_size(facts, paths),
        )
    if validation:
        facts.put("data.validation_source", find(validation[0]))
    if more := ", ".join(validation[1:]):
        facts.notes.append(
            f"data.validation_source is one source: of the eval_dataset's, {more} are left out."
        )


def _weigh_by_size(facts: KeyFacts, paths: list[str]) -> list[float]:
    """Returns weights that read each source in full, as their `concat` does: its bytes, of which there are about so
    many a token.
    """
    files = [Path(path).expanduser() for path in paths]
    if all(file.is_file() for file in files):
        return [float(file.stat().st_size) for file in files]
    facts.notes.append(
        "data.weights are even, since not all sources are here: by their sizes each would be read in full once."
    )
    return [1.0] * len(paths)


def _finder(facts: KeyFacts, directory: str, near: Path) -> Callable[[str], str]:
    """Returns a function from a dataset's name to its file, as the directory's dataset_info.json says."""
    folder = path_near(directory, near)
    listed: Any = {}
    if folder is not None and (folder / INFO).is_file():
        try:
            listed = json.loads((folder / INFO).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            facts.notes.append(f"{short(folder / INFO)} cannot be read.")

    def find(name: str) -> str:
        entry = listed.get(name) if isinstance(listed, dict) else None
        if Path(name).is_file():
            return name
        which = f"dataset {short(name)}"
        if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
            path = f"{directory}/{name}.json"
            facts.notes.append(
                f"{which}: which file it is does not stand in {directory}/{INFO} here: {short(path)} is a guess."
            )
            return path
        columns = entry.get("columns") or {}
        if media := ", ".join(column for column in columns if column in MEDIA):
            raise ConfigError(
                f"{which} has {media} beside its text, which are not read here; take one of text alone."
            )
        if renamed := [column for column in columns.values() if column not in COLUMNS]:
            facts.notes.append(
                f"{which}: its columns {short(', '.join(map(str, renamed)))} are to be renamed."
            )
        return str((folder or Path(directory)) / entry["file_name"])

    return find


def path_near(name: str, near: Path) -> Path | None:
    """Returns a file or directory as it is named from here, or from one of the directories above their file."""
    candidates = [
        Path(name).expanduser(),
        *(folder / name for folder in (near, *near.parents)),
    ]
    return next((path for path in candidates if path.exists()), None)


def _evaluation(facts: KeyFacts) -> None:
    by = facts.get("evaluated by")
    source = facts.source("evaluated by")
    if by == "steps":
        facts.put(
            "eval.every", facts.take("eval steps") or facts.get("log.every") or 500
        )
    elif by == "epoch":
        facts.notes.append(f"{source}: eval.every counts steps, set it.")
    why = source if by else "eval_strategy is not given, so nothing was evaluated"
    facts.drop("eval steps", why)
    facts.take("evaluated by")
    if not facts.get("eval.every"):
        facts.drop("eval.patience", why)
    stated = "data.validation" in facts.values or facts.get("data.validation_source")
    if not facts.get("train.sequence_length") or stated:
        return
    if facts.get("eval.every"):
        facts.notes.append(
            "neither val_size nor eval_dataset says what is evaluated: data.validation is left at its own share."
        )
    else:
        facts.put("data.validation", 0.0)

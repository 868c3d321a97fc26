"""Keys of ours that follow from several of theirs together: each function takes its facts and puts what they come to."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshtrain.adopt.configs.key_rows import FactValue, KeyFacts, contradiction
from meshtrain.errors import ConfigError, short

MEDIA = ("images", "videos", "audios")
INFO = "dataset_info.json"  # in their dataset_dir: what file a dataset's name stands for
# The columns that a record has by its format, which need no translation here.
COLUMNS = {
    "instruction", "input", "output", "history", "system", "messages", "conversations", "chosen", "rejected", "tools", "prompt", "query",
    "response", "text",
}  # fmt: skip


def follow(facts: KeyFacts, devices: int | None, steps: int | None, near: Path) -> None:
    """Puts all that follows. `near`: a directory to look for their files in, and in those above it."""
    _refuse_what_does_not_train(facts)
    _mesh(facts, devices)
    _precision(facts)
    _optimizer(facts)
    _steps(facts, steps)
    _checkpoints(facts)
    _tuning(facts)
    _data(facts, near)
    _evaluation(facts)
    _model(facts)
    trackers = [name for name in ("tensorboard", "wandb") if facts.take(f"tracker {name}")]
    if trackers:
        facts.put("telemetry.trackers", sorted({*trackers, *(facts.get("telemetry.trackers") or [])}))


def _refuse_what_does_not_train(facts: KeyFacts) -> None:
    """Theirs trains where do_train says so alone."""
    for key in ("do_predict", "do_eval"):
        given = facts.keys.get(key)
        if given is not None and given.value is True and "do_train" not in facts.keys:
            raise given.refused("without do_train this file does not train")


def _optimizer(facts: KeyFacts) -> None:
    """One key, beta1, is Adam's first and the momentum of others; and DeepSpeed's schedules and optimizers have values of their own."""
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
        for path, value in (("beta1", 0.9), ("beta2", 0.99 if name == "lion" else 0.999)):
            facts.values.setdefault(f"optimizer.{path}", FactValue(value))
    elif not llama_factory:
        facts.notes.append("no file has an optimizer, which its script then makes: set the section optimizer.")
    peak, schedule = facts.take("usual peak"), facts.keys.get("scheduler.type")
    if peak and schedule and "scheduler.params.warmup_max_lr" not in facts.keys:
        facts.drop("optimizer.learning_rate", f"{schedule.text} rises to {peak:g} unless warmup_max_lr is given")
        facts.put("optimizer.learning_rate", peak)
    rises = facts.get("warm-up steps") or facts.get("warm-up share")
    if schedule and rises and "scheduler.params.warmup_type" not in facts.keys:
        facts.differs.append((schedule, "the warm-up is linear here, theirs logarithmic unless warmup_type is linear"))
    if not llama_factory and not any(key.startswith("scheduler.") for key in facts.keys):
        facts.put("optimizer.schedule", "constant")
        facts.notes.append("no file has a scheduler, so the rate is constant here; the script may have set one.")


def _mesh(facts: KeyFacts, devices: int | None) -> None:
    """Their devices are data ranks, but for DeepSpeed's AutoTP; accumulation is in microbatches here.

    train_batch_size = rows a device x accumulation x data ranks; two of them say the third (DeepSpeed, docs/_pages/config-json.md).
    """
    tensor = facts.get("mesh.tensor") or 1
    if devices is not None and devices % tensor:
        raise ConfigError(
            f"--devices {devices} does not divide into {facts.source('mesh.tensor')}; give a multiple of it."
        )
    ranks = None if devices is None else devices // tensor
    total, rows, pieces = (facts.stated(path) for path in ("rows a step", "rows a device", "accumulation"))
    for path in ("rows a step", "rows a device", "accumulation"):
        given = facts.given(path)
        if given is not None and facts.get(path) < 1:
            raise given.refused("it must be at least 1")
    if ranks is None and total and rows and pieces and total % (rows * pieces) == 0:
        ranks = total // (rows * pieces)
    elif ranks is None:
        ranks = 1
        facts.notes.append("--devices is not given, and the files do not tell: this is for one device.")
    if total:
        if rows is None:
            pieces = pieces or 1
            rows = _quotient(facts, total, pieces * ranks, ranks)
        elif pieces is None:
            pieces = _quotient(facts, total, rows * ranks, ranks)
        elif rows * pieces * ranks != total:
            raise _uneven(facts, ranks)
    rows = rows or facts.get("rows a device") or 1
    pieces = pieces or facts.get("accumulation") or 1
    for path in ("rows a step", "rows a device", "accumulation"):
        facts.take(path)
    facts.put("mesh.data", ranks)
    facts.put("mesh.tensor", tensor)
    facts.put("parallel.microbatches", pieces)
    facts.put("train.global_batch_size", rows * pieces * ranks)


def _quotient(facts: KeyFacts, total: int, parts: int, ranks: int) -> int:
    if total % parts:
        raise _uneven(facts, ranks)
    return total // parts


def _uneven(facts: KeyFacts, ranks: int) -> ConfigError:
    stated = [path for path in ("rows a device", "accumulation") if facts.given(path)]
    product = math.prod(facts.get(path) for path in stated) * ranks
    parts = " x ".join([*(facts.source(path) for path in stated), f"{ranks} data rank{'s' * (ranks > 1)}"])
    whole = f", but {parts} is {product}" if len(stated) == 2 else f" is no multiple of {parts}, {product}"
    return ConfigError(f"{facts.source('rows a step')}{whole}; let them agree.")


def _precision(facts: KeyFacts) -> None:
    said = [given for name in ("fp16", "bf16", "pure bf16") if facts.get(name) and (given := facts.given(name))]
    half = facts.take("fp16")
    chosen = "bfloat16" if facts.take("bf16") or facts.get("pure bf16") else "float16" if half else "float32"
    facts.take("pure bf16")
    if half and chosen == "bfloat16":
        raise contradiction(said[0], said[1], "precision.compute")
    facts.put("precision.compute", chosen)
    if chosen != "float16":
        for key in ("loss_scale", "loss_scale_window", "loss_scale_hysteresis"):
            facts.drop(f"precision.{key}", "it counts with float16 alone")


def _steps(facts: KeyFacts, steps: int | None) -> None:
    """max_steps counts before epochs; a share of the steps becomes a number where that of the steps is known."""
    if facts.get("train.steps"):
        facts.drop("train.epochs", f"{facts.source('train.steps')} counts")
        steps = facts.get("train.steps")
    rate, final = facts.get("optimizer.learning_rate"), facts.take("final rate")
    if final is not None and rate:
        facts.put("optimizer.final_ratio", float(f"{final / rate:.6g}"))
    share, given = facts.get("warm-up share"), facts.given("warm-up share")
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
            f"{given.text} ({given.where}) is a share of steps that follow from the data: set optimizer.warmup_steps, or give --steps."
        )
    if warmup is None:
        warmup = facts.get("warm-up steps") or 0
    facts.take("warm-up share"), facts.take("warm-up steps")
    if facts.get("optimizer.schedule"):
        facts.put("optimizer.warmup_steps", warmup)


def _checkpoints(facts: KeyFacts) -> None:
    by = facts.get("saved by")
    if by == "no":
        facts.drop("checkpoint.every", f"{facts.source('saved by')}")
    elif by in ("epoch", "best"):
        facts.notes.append(
            f"{facts.source('saved by')}: checkpoint.every counts steps, set it; at the end one is written."
        )
        facts.drop("checkpoint.every", f"{facts.source('saved by')}")
    elif facts.get("tuned") and "checkpoint.every" not in facts.values:
        facts.put("checkpoint.every", 500)
    facts.take("saved by")


def _tuning(facts: KeyFacts) -> None:
    tuned = facts.take("tuned")
    if facts.get("train.objective") == "dpo" and tuned == "full":
        stage = facts.given("train.objective")
        assert stage, "the default is sft"
        raise stage.refused("the reference is the model without its adapters here, so finetuning_type must be lora")
    if tuned != "lora":
        for key in ("rank", "alpha", "targets", "dropout", "rslora"):
            facts.drop(f"lora.{key}", f"finetuning_type is {tuned}")
        facts.drop("beside adapters", f"finetuning_type is {tuned}")
    beside = facts.take("beside adapters")
    if beside:
        facts.put("train.trainable", beside)
    names, more = facts.get("frozen but"), facts.get("frozen but also")
    if tuned == "freeze":
        if not names:
            raise ConfigError(
                "finetuning_type is freeze, which trains all of some layers unless freeze_trainable_modules names modules; "
                "train.trainable names weights over all layers."
            )
        facts.put("train.trainable", [*names, *(more or [])])
        if (given := facts.given("frozen but")) and "freeze_trainable_layers" not in facts.keys:
            facts.differs.append(
                (
                    given,
                    "these are trained in all layers here, in theirs in the last 2 unless freeze_trainable_layers says more",
                )
            )
        facts.take("frozen but"), facts.take("frozen but also")
    for path in ("frozen but", "frozen but also"):
        facts.drop(path, f"finetuning_type is {tuned}")


def _model(facts: KeyFacts) -> None:
    name = facts.take("model")
    if name is None:
        return
    facts.put("model.weights", name)
    facts.put("data.tokenizer", f"{name.rstrip('/')}/tokenizer.json")
    if not Path(name).expanduser().is_dir():
        facts.notes.append(f"model.weights {short(name)} is no directory here: download it, and say where it is.")


def _data(facts: KeyFacts, near: Path) -> None:
    stage = facts.take("stage")
    packing, given = facts.get("packing"), facts.given("packing")
    facts.take("packing")
    if not facts.take("neat") and packing and given and stage == "sft":
        facts.differs.append(
            (given, "examples that are packed together do not see each other here, as with neat_packing")
        )
    if stage == "sft":
        # Unpacked a row is one example, as theirs is, so that batches and epochs keep their meaning.
        facts.put("data.batching", "packed" if packing else "grouped")
    elif stage == "pt":
        facts.put("data.batching", "packed" if packing is False else "window")
    elif given:
        facts.left.append((given, "pairs are packed"))
    names, directory = facts.take("datasets") or [], facts.take("dataset_dir")
    held = facts.take("eval datasets") or []
    shares = facts.take("shares")
    if not names and not held:
        return
    find = _finder(facts, directory or "data", near)
    paths = [find(name) for name in names]
    if len(paths) == 1:
        facts.put("data.source", paths[0])
    elif paths:
        facts.put("data.source", "mixture")
        facts.put("data.mixture", paths)
        facts.put("data.weights", shares if shares and len(shares) == len(paths) else _by_size(facts, paths))
    if held:
        facts.put("data.validation_source", find(held[0]))
        if len(held) > 1:
            facts.notes.append(
                f"data.validation_source is one source: of the eval_dataset's, {', '.join(held[1:])} are left out."
            )


def _by_size(facts: KeyFacts, paths: list[str]) -> list[float]:
    """Each source in full, as their `concat` has it: shares by the bytes, of which there are about so many a token."""
    if all(Path(path).expanduser().is_file() for path in paths):
        return [float(Path(path).expanduser().stat().st_size) for path in paths]
    facts.notes.append(
        "data.weights are even, since not all sources are here: by their sizes each would be read in full once."
    )
    return [1.0] * len(paths)


def _finder(facts: KeyFacts, directory: str, near: Path) -> Callable[[str], str]:
    """A function of a dataset's name: its file, as the directory's dataset_info.json says."""
    folder = path_near(directory, near)
    listed: dict[str, Any] = {}
    if folder is not None and (folder / INFO).is_file():
        try:
            listed = json.loads((folder / INFO).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            facts.notes.append(f"{short(folder / INFO)} cannot be read.")

    def find(name: str) -> str:
        entry = listed.get(name) if isinstance(listed, dict) else None
        if Path(name).is_file():
            return name
        if not isinstance(entry, dict) or not isinstance(entry.get("file_name"), str):
            path = f"{directory}/{name}.json"
            facts.notes.append(
                f"dataset {short(name)}: which file it is does not stand in {directory}/{INFO} here: {short(path)} is a guess."
            )
            return path
        pictures = [column for column in entry.get("columns") or {} if column in MEDIA]
        if pictures:
            raise ConfigError(
                f"dataset {short(name)} has {', '.join(pictures)} beside its text, which are not read here; take one of text alone."
            )
        columns = [column for column in (entry.get("columns") or {}).values() if column not in COLUMNS]
        if columns:
            facts.notes.append(
                f"dataset {short(name)}: its columns {short(', '.join(map(str, columns)))} are to be renamed."
            )
        return str((folder or Path(directory)) / entry["file_name"])

    return find


def path_near(name: str, near: Path) -> Path | None:
    """A file or directory as it is named from here, or from one of the directories above their file."""
    tried = [Path(name).expanduser(), *(folder / name for folder in (near, *near.parents))]
    return next((path for path in tried if path.exists()), None)


def _evaluation(facts: KeyFacts) -> None:
    by, every = facts.get("evaluated by"), facts.get("eval steps")
    held = facts.get("data.validation") or facts.get("data.validation_source")
    if by == "steps":
        facts.put("eval.every", every or facts.get("log.every") or 500)
        facts.take("eval steps")
    elif by == "epoch":
        facts.notes.append(f"{facts.source('evaluated by')}: eval.every counts steps, set it.")
    why = f"{facts.source('evaluated by')}" if by else "eval_strategy is not given, so nothing was evaluated"
    facts.drop("eval steps", why)
    facts.take("evaluated by")
    if not facts.get("eval.every"):
        facts.drop("eval.patience", why)
    if facts.get("train.sequence_length") and not held and "data.validation" not in facts.values:
        _hold_out(facts)


def _hold_out(facts: KeyFacts) -> None:
    """Without val_size and eval_dataset all is trained; evaluating then takes our own share."""
    if facts.get("eval.every"):
        facts.notes.append(
            "neither val_size nor eval_dataset says what is evaluated: data.validation is left at its own share."
        )
    else:
        facts.put("data.validation", 0.0)

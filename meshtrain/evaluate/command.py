"""Evaluates a model: what `python -m meshtrain.evaluate` does once its words are read.

Each way returns a record, and it as lines.
"""

import argparse
import math
from typing import Any

from meshtrain import hub
from meshtrain.adopt.extra_files import run_of
from meshtrain.config import Config
from meshtrain.config.model import positions_of
from meshtrain.data.documents import documents
from meshtrain.data.input_files import find
from meshtrain.data.prepare import describe_skipped
from meshtrain.errors import ConfigError, say, short
from meshtrain.evaluate import USUAL
from meshtrain.evaluate.harness import SHOWN, run_tasks, table
from meshtrain.evaluate.perplexity import TEXT_LINES, described, perplexity
from meshtrain.evaluate.scoring import Scorer
from meshtrain.evaluate.validation import (
    describe_images,
    describe_text,
    evaluate_images,
    evaluate_text,
    validation_images,
    validation_text,
)
from meshtrain.families import FAMILIES
from meshtrain.generate.opened import Opened, open_asked, place_model
from meshtrain.reader import read_config
from meshtrain.telemetry.progress import EvaluationProgress

# The record of --json, and the lines for people.
Result = tuple[dict[str, Any], list[str]]


def evaluate(options: argparse.Namespace) -> Result:
    options.path = hub.directory(options.path)
    config = read_config(options.path, options.step, options.precision)
    if FAMILIES[config.model.family].images:
        return _images(options, config)
    if options.images is not None:
        raise ConfigError(
            f"--images is for models of images, but {short(options.path)} is one of text (family "
            f"{config.model.family})."
        )
    opened = open_asked(options, options.batch, options.length or USUAL)
    evaluated = _tasks if options.tasks else _text if options.text else _validation
    record, lines = evaluated(opened, options)
    return {"model": opened.name, "step": opened.model.step} | record, lines


def _validation(opened: Opened, options: argparse.Namespace) -> Result:
    with EvaluationProgress("evaluating", "batches") as progress:
        validation = validation_text(options.path, opened.model)
        record = evaluate_text(opened.model, validation, options.batch, progress)
    return record, describe_text(record)


def _text(opened: Opened, options: argparse.Namespace) -> Result:
    inputs = find(options.text)
    length = options.length or min(opened.longest, USUAL)
    stride = min(options.stride or max(length // 2, 1), length)
    size = (
        None
        if any(file.compression or file.parquet for file in inputs.files)
        else inputs.size
    )
    texts = documents(inputs.files, options.text_field)
    with EvaluationProgress("scoring", "bytes") as progress:
        show = lambda counts: progress(counts.bytes, size)
        counts = perplexity(
            Scorer(opened.model, options.batch),
            opened.tokenizer,
            texts,
            length,
            stride,
            show,
        )
    if counts.skipped:
        say(f"{describe_skipped(counts.skipped)}.")
    record = counts.record()
    rows = f"rows                  of {length:,} tokens, {stride:,} apart"
    return {"length": length, "stride": stride, **record}, [
        *described(record, TEXT_LINES),
        rows,
    ]


def _tasks(opened: Opened, options: argparse.Namespace) -> Result:
    results = run_tasks(
        opened,
        options.tasks,
        include=options.include_path,
        shots=options.shots,
        limit=options.limit,
        chat=bool(options.chat),
        rows=options.batch,
        longest=options.length,
    )
    return {name: results[name] for name in SHOWN if name in results}, [table(results)]


def _images(options: argparse.Namespace, config: Config) -> Result:
    if options.text or options.tasks:
        raise ConfigError(
            f"--text and --tasks are for models of text, but {short(options.path)} is one of images."
        )
    model = place_model(
        options.path,
        config,
        options.mesh,
        options.batch,
        positions_of(config.model),
        options.weights,
        step=options.step,
        adapter=options.adapter,
        precision=options.precision,
    )
    with EvaluationProgress("evaluating", "batches") as progress:
        validation, batches = validation_images(
            options.path, model.config, options.images
        )
        record = evaluate_images(model, validation, batches, options.batch, progress)
    return {
        "model": run_of(options.path).name,
        "step": model.step,
    } | record, describe_images(record)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

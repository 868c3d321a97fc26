"""Changes that improve a layout: the best schedule; and if it does not fit, the cheapest changes of a key or two, by
step time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.cluster.cluster import Cluster
from meshtrain.config import Config, ConfigError, check, replaced
from meshtrain.config.auto import CHUNKED, PLAIN
from meshtrain.config.follow import CHUNK, put, runs_table
from meshtrain.config.values import as_text
from meshtrain.errors import short
from meshtrain.families import FAMILIES
from meshtrain.parallel.placement import stages
from meshtrain.plan import pipeline, shapes
from meshtrain.plan.activations import kernel
from meshtrain.plan.choices import (
    WORTH_SAYING,
    Keys,
    contexts,
    ends_empty,
    every_schedule,
)
from meshtrain.plan.estimate import Plan, estimate, estimate_by_formula
from meshtrain.schedule.generators import legal_chunks
from meshtrain.units import size

Settings = tuple[str, ...]  # as for --set
Changed = tuple[Settings, Config]
# Times the bytes, at least, that a schedule holds of what the plain one would
HEAVY = 1.1


@dataclass(frozen=True)
class Change:
    """Settings that make a layout fit, or faster, and what it then holds and takes."""

    settings: Settings
    nbytes: float
    seconds: float


def cheapest(over: Plan, count: int = 3) -> list[Change]:
    """Up to `count` changes that make `over` fit on the same devices: of one step, and if those are too few of more.

    A schedule that makes it fit alone comes first, the others by step time.
    """
    frontier: dict[Settings, Config] = {(): over.config}
    fitting: dict[Settings, Change] = {}
    for _ in range(3):
        following: dict[Settings, Config] = {}
        for settings, config in frontier.items():
            for more, changed in _neighbours(config, over.cluster):
                path = tuple(sorted(_settings_by_key(settings + more).values()))
                if path in following or path in fitting:
                    continue
                try:
                    check(changed)
                    candidate = estimate(changed, over.cluster)
                except ConfigError:
                    continue
                if candidate.bytes >= over.bytes:
                    continue
                if candidate.fits:
                    fitting[path] = Change(path, candidate.bytes, candidate.seconds)
                else:
                    following[path] = changed
        if len(fitting) >= count:
            break
        frontier = following
    return sorted(fitting.values(), key=lambda c: (not _schedule_alone(c), c.seconds))[
        :count
    ]


def _schedule_alone(change: Change) -> bool:
    keys = set(_settings_by_key(change.settings))
    return "parallel.schedule" in keys and keys <= {
        f"parallel.{key}" for key in _SCHEDULE
    }


def changes(planned: Plan) -> list[Change]:
    """The cheapest ways to make a plan fit; where it does, the best schedule, if it has another."""
    if not planned.fits:
        return cheapest(planned)
    best = best_schedule(planned)
    return [best] if best else []


def best_schedule(planned: Plan) -> Change | None:
    """The schedule that takes least time on the same mesh with the same microbatches, of those that fit; None where it
    would gain little or nothing. By formula, and simulated to be sure.
    """
    if (fastest := _fastest_schedule(planned.config, planned.cluster)) is None:
        return None
    settings, config = fastest
    best = estimate(config, planned.cluster)
    gains = best.fits and best.seconds < WORTH_SAYING * planned.seconds
    return Change(settings, best.bytes, best.seconds) if gains else None


def notes(planned: Plan) -> list[str]:
    """Sentences on what products in float8 gain, where there are any, and on what the schedule costs beside others, if
    it does.
    """
    return [
        *_advise_float8(planned),
        *_advise_qk_clip(planned),
        *_advise_schedule(planned),
    ]


def _advise_qk_clip(planned: Plan) -> list[str]:
    platform = planned.cluster.accelerator.platform
    how = kernel(planned.config, platform)
    usual = kernel(put(planned.config, optimizer={"qk_clip": 0.0}), platform)
    if how == usual:
        return []
    return [
        f"optimizer.qk_clip asks for each head's largest logit, which {usual} attention does not return: {how} "
        "attention takes its place."
    ]


def _advise_float8(planned: Plan) -> list[str]:
    config = planned.config
    if config.precision.matmul != "float8":
        return []
    plain = estimate(put(config, precision={"matmul": "compute"}), planned.cluster)
    takes = planned.seconds / plain.seconds
    pays = "pays" if takes < WORTH_SAYING else "does not pay"
    sentence = (
        f"precision.matmul float8 {pays} for this model here: the step takes {takes:.2f} of the time, and "
        f"holds {planned.bytes / plain.bytes:.2f} of the bytes, of compute."
    )
    if config.precision.float8_recipe == "blockwise":
        return [
            f"{sentence} XLA has no kernel for a scale of each block, so that products gain nothing."
        ]
    if config.model.moe.experts:
        sentence += " Products of experts gain nothing: what is rounded is multiplied in precision.compute."
    if not planned.cluster.accelerator.peak.float8:
        return [
            f"{sentence} {planned.cluster.accelerator.name} has no products in float8."
        ]
    return [sentence]


def _advise_schedule(planned: Plan) -> list[str]:
    best = best_schedule(planned) if planned.fits else None
    if best is None:
        return _heavy(planned)
    faster = (
        f"{', '.join(best.settings)} would take {best.seconds / planned.seconds:.2f} of the step's time and hold "
        f"{size(best.nbytes)} a device in place of {size(planned.bytes)}."
    )
    return [faster, *_heavy(planned)]


def _heavy(planned: Plan) -> list[str]:
    """1F1B is taken for what it saves in memory, and other schedules for less idle time or still less memory: by the
    plan they may not.
    """
    config = planned.config
    chunks = stages(planned.config).chunks
    schedule = config.parallel.schedule
    plain = (PLAIN, 1) if legal_chunks(schedule) or chunks == 1 else (CHUNKED, chunks)
    if (
        not runs_table(config)
        or (schedule, chunks) == plain
        or config.parallel.layer_split is not None
    ):
        return []
    other = estimate(
        put(config, parallel={"schedule": plain[0], "virtual_stages": plain[1]}),
        planned.cluster,
    )
    if planned.bytes < HEAVY * other.bytes:
        return []
    waits = ""
    if pipeline.facts(config).split:
        recomputed = config.parallel.remat != "none"
        what = (
            f"what remat: {config.parallel.remat} computes again waits"
            if recomputed
            else "cotangents wait"
        )
        waits = f", since {what} for the weight gradients"
    return [
        f"{short(schedule)} holds {planned.bytes / 2**30:.3g} GiB a device{waits}, where {plain[0]} would hold "
        f"{other.bytes / 2**30:.3g} and "
        f"take {other.seconds / planned.seconds:.2f} of the step's time."
    ]


def sentence(over: Plan, changes: list[Change]) -> str:
    """Returns one sentence that says by how much a plan does not fit, and what would help."""
    device = over.cluster.accelerator
    missing = over.bytes - device.usable_bytes
    start = (
        f"the layout needs {over.bytes / 2**30:.1f} GiB a device, {missing / 2**30:.1f} GiB more than the "
        f"{device.usable_bytes / 2**30:.1f} GiB "
        f"that {device.name} has for it"
    )
    if not changes:
        return (
            f"{start}; no small change on {over.devices} devices makes it fit: search with --search, or take more "
            "devices."
        )
    texts = [
        f"{', '.join(c.settings)} ({c.nbytes / 2**30:.1f} GiB, step x {c.seconds / over.seconds:.2f})"
        for c in changes
    ]
    return f"{start}; cheapest ways to make it fit: {'; '.join(texts)}."


def _settings_by_key(settings: Settings) -> dict[str, str]:
    return {setting.partition("=")[0]: setting for setting in settings}


_SCHEDULE = ("schedule", "virtual_stages", "layer_split")


def _fastest_schedule(config: Config, cluster: Cluster) -> Changed | None:
    """The fastest of the other schedules by formula, with its settings; if none fits, the one that holds least."""
    ranked = []
    layers = config.model.layers
    pipelined = config.mesh.pipeline
    named = every_schedule(layers, config.mesh)
    if len(named) == 1:
        return None
    for schedule, chunks in named:
        keys = {"schedule": schedule, "virtual_stages": chunks}
        if (split := ends_empty(layers, chunks * pipelined)) is not None:
            keys["layer_split"] = split
        other = put(config, parallel=keys)
        try:
            check(other)
        except ConfigError:
            continue
        seconds, nbytes = estimate_by_formula(other, cluster)
        fits = nbytes <= cluster.accelerator.usable_bytes
        ranked.append((not fits, seconds if fits else nbytes, nbytes, other))
    fastest = min(ranked, key=lambda r: r[:3], default=(config,))[-1]
    if fastest == config:
        return None
    changed = [
        *_SCHEDULE[:2],
        *_SCHEDULE[2:] * (fastest.parallel.layer_split != config.parallel.layer_split),
    ]
    return tuple(
        f"parallel.{key}={as_text(getattr(fastest.parallel, key))}" for key in changed
    ), fastest


def _neighbours(config: Config, cluster: Cluster) -> Iterator[Changed]:
    """Configs one step away that tend to hold less, with the settings that lead there."""
    mesh = config.mesh

    def change(section: str, **keys) -> Changed:
        settings = tuple(f"{section}.{k}={as_text(v)}" for k, v in keys.items())
        return settings, replaced(config, **{section: keys})

    if fastest := _fastest_schedule(config, cluster):
        yield fastest
    for keys in _parallel_keys(config):
        yield change("parallel", **keys)
    if shapes.loss_chunk(config) > CHUNK and not FAMILIES[config.model.family].images:
        yield change("train", loss_chunk=CHUNK)
    if config.precision.compute == "float32":
        yield change("precision", compute="bfloat16")
    if mesh.data % 2 == 0:
        yield change("mesh", data=mesh.data // 2, tensor=mesh.tensor * 2)
        yield change("mesh", data=mesh.data // 2, pipeline=mesh.pipeline * 2)
        if 2 * mesh.context in contexts(config, mesh.devices):
            yield change("mesh", data=mesh.data // 2, context=mesh.context * 2)


def _parallel_keys(config: Config) -> Iterator[Keys]:
    """Yields keys of the section parallel with which a device tends to hold less."""
    parallel = config.parallel
    mesh = config.mesh
    if mesh.data * mesh.context > 1:
        for stage in range(parallel.zero_stage + 1, 4):
            yield {"zero_stage": stage}
        if parallel.zero_stage >= 2 and parallel.zero_hold:
            yield {"zero_hold": False}
    unnamed = {
        name: () for name in ("remat_keep", "remat_offload") if getattr(parallel, name)
    }
    for remat in ("selective", "dots", "full"):
        if parallel.remat != remat:
            yield {"remat": remat, **unnamed}
    for name in parallel.remat_keep:
        yield {
            "remat_keep": tuple(other for other in parallel.remat_keep if other != name)
        }
    if mesh.tensor > 1 and not parallel.sequence_parallel:
        yield {"sequence_parallel": True}
    for factor in (2, 4, 8):
        yield {"microbatches": parallel.microbatches * factor}
    if parallel.vocab == "edge" and mesh.pipeline > 1:
        yield {"vocab": "spread"}

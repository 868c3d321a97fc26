"""What to change in a layout that does not fit: the cheapest changes of a key or two, by step time."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshtrain.config import Config, ConfigError, check, replaced
from meshtrain.plan.cluster.cluster import Cluster
from meshtrain.plan.estimate import Plan, estimate


@dataclass(frozen=True)
class Change:
    """Settings that make a layout fit, and what they cost."""

    settings: tuple[str, ...]  # as for --set
    nbytes: float
    seconds: float


def cheapest(over: Plan, count: int = 3) -> list[Change]:
    """Up to `count` changes that make `over` fit on the same devices, fastest first: of one step, and if those are too few of more."""
    frontier: dict[tuple[str, ...], Config] = {(): over.config}
    found: dict[tuple[str, ...], Change] = {}
    for _ in range(3):
        following: dict[tuple[str, ...], Config] = {}
        for settings, config in frontier.items():
            for more, changed in _neighbours(config):
                path = tuple(sorted({**_by_key(settings), **_by_key(more)}.values()))
                if path in following or path in found:
                    continue
                candidate = _planned(changed, over.cluster)
                if candidate is None or candidate.bytes >= over.bytes:
                    continue
                if candidate.fits:
                    found[path] = Change(path, candidate.bytes, candidate.seconds)
                else:
                    following[path] = changed
        if len(found) >= count:
            break
        frontier = following
    return sorted(found.values(), key=lambda c: c.seconds)[:count]


def sentence(over: Plan, changes: list[Change]) -> str:
    """By how much a plan does not fit, and what would help, in one sentence."""
    device = over.cluster.accelerator
    short = over.bytes - device.usable_bytes
    start = (
        f"the layout needs {over.bytes / 2**30:.1f} GiB a device, {short / 2**30:.1f} GiB more than the {device.usable_bytes / 2**30:.1f} GiB "
        f"that {device.name} has for it"
    )
    if not changes:
        return f"{start}; no small change on {over.devices} devices makes it fit: search with --search, or take more devices."
    ways = [
        f"{', '.join(c.settings)} ({c.nbytes / 2**30:.1f} GiB, step x {c.seconds / over.seconds:.2f})" for c in changes
    ]
    return f"{start}; cheapest ways to make it fit: {'; '.join(ways)}."


def _by_key(settings: tuple[str, ...]) -> dict[str, str]:
    return {setting.partition("=")[0]: setting for setting in settings}


def _planned(config: Config, cluster: Cluster) -> Plan | None:
    try:
        check(config)
        return estimate(config, cluster)
    except ConfigError:
        return None


def _neighbours(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Configs one step away that tend to hold less, with the settings that lead there."""
    parallel, mesh = config.parallel, config.mesh

    def one(section: str, **keys) -> tuple[tuple[str, ...], Config]:
        settings = tuple(f"{section}.{k}={_text(v)}" for k, v in keys.items())
        return settings, replaced(config, **{section: keys})

    if mesh.data > 1:
        for stage in range(parallel.zero_stage + 1, 4):
            yield one("parallel", zero_stage=stage)
        if parallel.zero_stage >= 2 and parallel.zero_hold:
            yield one("parallel", zero_hold=False)
    unnamed = {name: () for name in ("remat_keep", "remat_offload") if getattr(parallel, name)}
    for remat in ("dots", "full"):
        if parallel.remat != remat:
            yield one("parallel", remat=remat, **unnamed)
    for name in parallel.remat_keep:
        yield one("parallel", remat_keep=tuple(other for other in parallel.remat_keep if other != name))
    if mesh.tensor > 1 and not parallel.sequence_parallel:
        yield one("parallel", sequence_parallel=True)
    for factor in (2, 4, 8):
        yield one("parallel", microbatches=parallel.microbatches * factor)
    if parallel.vocab == "edge" and mesh.pipeline > 1:
        yield one("parallel", vocab="spread")
    if config.precision.compute == "float32":
        yield one("precision", compute="bfloat16")
    if mesh.data % 2 == 0:
        yield one("mesh", data=mesh.data // 2, tensor=mesh.tensor * 2)
        yield one("mesh", data=mesh.data // 2, pipeline=mesh.pipeline * 2)


def _text(value: object) -> str:
    """A value as --set takes it."""
    return f"[{','.join(value)}]" if isinstance(value, tuple) else str(value).lower()

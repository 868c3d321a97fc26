"""Flags of XLA and variables of NCCL for a config on a cluster: what is set, why, and which versions take it.

    launch ──► supervisor of a node: --flags CLUSTER ──► the training process
                 versions that are installed there,        XLA_FLAGS, NCCL_...
                 what its user set, which wins

An XLA flag that a version does not know ends the process before its first line. So a flag is set only with versions
that were seen to take it; `tests/launch/test_flags.py` asks the versions that are installed. NCCL ignores variables
that it does not know. The options that the step itself gives the compiler, whoever starts it, stand in `meshtrain.xla`.

Sources: NCCL's user guide, Environment Variables; XLA's own words on its flags (XLA_FLAGS=--help); NVIDIA's
JAX-Toolbox, GPU performance; compiled steps (`experiments/README.md`, Communication).
"""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from meshtrain import xla
from meshtrain.cluster.cluster import Cluster
from meshtrain.cluster.topology import RAILS
from meshtrain.config import Config
from meshtrain.config.reduce import overlaps_reduce_scatter, sends_by_table

Texts = Mapping[str, str]

JAXLIB = "jaxlib"
NCCL = "NCCL"
PACKAGES = {JAXLIB: ("jaxlib",), NCCL: ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
KNOWN = (
    "0.10.2",
    "0.13",
)  # versions of jaxlib from, and before, which XLA's flags were seen to be taken
XLA = "xla_"
# Seconds; `meshtrain.train` has processes wait as long for one that compiles
STUCK = 3600


@dataclass(frozen=True)
class Preset:
    """A flag or variable that is set on several nodes if it `is_of_use` for a config on a cluster."""

    name: str  # a flag of XLA, or an environment variable
    library: str
    since: str
    before: str  # the first version without it; "": there is none
    value: str
    is_of_use: Callable[[Config, Cluster], bool]
    reason: str

    @property
    def versions(self) -> str:
        return f"{self.library} {self.since} and later" + (
            f", before {self.before}" if self.before else ""
        )


@dataclass(frozen=True)
class Setting:
    """A preset for one config and cluster; `left`: why it is not set after all, or nothing."""

    name: str
    value: str
    versions: str
    reason: str
    left: str = ""


def _has_messages(config: Config, _: Cluster) -> bool:
    return config.mesh.pipeline > 1 or config.parallel.reduce.algorithm != "psum"


def _is_slow_between_rails(_: Config, cluster: Cluster) -> bool:
    return cluster.topology == RAILS and (
        cluster.between_rails == "spine" or cluster.links.spine.oversubscription > 1
    )


PRESETS = (
    Preset(
        "xla_gpu_collective_permute_connected_components",
        JAXLIB,
        *KNOWN,
        "true",
        _has_messages,
        "messages go through communicators of those alone that send to each other; through one of all devices those "
        "inside a node were "
        "10 to 20 times as slow (openxla/xla, issue 40505)",
    ),
    Preset(
        "xla_gpu_nccl_termination_timeout_seconds",
        JAXLIB,
        *KNOWN,
        str(STUCK),
        lambda *_: True,
        "ends a process that waits for so long for others to begin a collective, where by itself it would wait for "
        "ever; longer than one "
        "process may compile after another",
    ),
    Preset(
        "NCCL_DEBUG",
        NCCL,
        "2.0",
        "",
        "WARN",
        lambda *_: True,
        "says which connection failed and why, where NCCL by itself says nothing; it costs nothing while none fails",
    ),
    Preset(
        "NCCL_CROSS_NIC",
        NCCL,
        "2.4",
        "",
        "0",
        _is_slow_between_rails,
        "rings keep to one rail from node to node: the way between the rails of this cluster is narrow",
    ),
    Preset(
        "NCCL_PXN_DISABLE",
        NCCL,
        "2.12",
        "",
        "1",
        lambda _, cluster: cluster.between_rails == "spine",
        "the cluster file says that messages between rails go over the spine, not through the node",
    ),
)

# What others say to set, and why it is left alone.
ADVICE = {
    "xla_gpu_enable_latency_hiding_scheduler=true": "jaxlib 0.10.2 compiles the same step with true, false and neither",
    "xla_gpu_{all_gather,reduce_scatter}_combine_threshold_bytes": (
        "MaxText sets 128 MiB for 405B on 128 nodes. Larger collectives wait less and hide less: for our ZeRO-3 step "
        "on 16 H100, by the "
        "compiled program, 128 MiB change nothing and 512 MiB cost 5%"
    ),
    "xla_gpu_enable_pipelined_{all_gather,all_reduce,reduce_scatter}=true": (
        "jaxlib 0.12 knows them only as old names of xla_gpu_pipeline_..., which 0.10 does not know; the step orders "
        "its own collectives"
    ),
    "xla_gpu_enable_async_collectives=true, xla_gpu_enable_async_all_gather=true": "gone, so that they end the "
    "process; collectives are asynchronous without",
    "xla_gpu_enable_triton_softmax_fusion=true, xla_gpu_graph_level=0": "gone, so that they end the process",
    "xla_gpu_experimental_enable_nvshmem=true": "gone in jaxlib 0.12",
    "JAX_OPTIMIZATION_LEVEL=O1": "NVIDIA's recommendation; on our steps it unrolls loops into three times as many "
    "kernels, for 1% of a ZeRO-3 step: try it",
    "CUDA_DEVICE_MAX_CONNECTIONS=1": "for programs that launch kernels in a fixed order by hand; XLA orders its own, "
    "and NVIDIA advises against it on Blackwell",
    "NCCL_NVLS_ENABLE=0": "NVIDIA's images set it until 2025; switches that sum are the fastest all-reduce in a node",
    "NCCL_ALGO, NCCL_PROTO": "NCCL chooses by size and by what the links are safe for: LL128 forced where they are "
    "not corrupts data",
    "NCCL_IB_GID_INDEX=3": "found by NCCL itself since 2.21 (-1); 3 is right on some networks only",
    "NCCL_IB_TIMEOUT=22": "20 by default since 2.23, and 7 retries: four seconds a try are enough unless the fabric "
    "is being repaired",
    "NCCL_IB_QPS_PER_CONNECTION=4": "for networks that hash each connection to one path; others pay with cache misses "
    "on the card",
    "NCCL_ASYNC_ERROR_HANDLING=1": "PyTorch's variable, which NCCL never reads; a run under `survive` finds stuck "
    "ranks itself",
}


def settings(
    config: Config,
    cluster: Cluster,
    versions: Texts,
    variables: Texts,
) -> list[Setting]:
    """Returns what is of use for a config on a cluster, with the versions of libraries that are there (those of
    `installed`) and a user's own environment, which wins.
    """
    if (
        cluster.accelerator.platform != "gpu"
        or config.mesh.devices <= cluster.devices_per_node
    ):
        return []
    return [
        Setting(
            p.name,
            p.value,
            p.versions,
            p.reason,
            _left(p, versions.get(p.library, ""), variables),
        )
        for p in PRESETS
        if p.is_of_use(config, cluster)
    ]


def _left(preset: Preset, version: str, variables: Texts) -> str:
    if preset.name in variables or re.search(
        rf"--{preset.name}\b", variables.get("XLA_FLAGS", "")
    ):
        return "set by the user"
    if not version:
        # An unknown variable of NCCL's is ignored, and an unknown flag ends the process.
        return f"{JAXLIB} is not installed here" if preset.library == JAXLIB else ""

    def parts(number: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", number)[:3]]

    early = parts(version) < parts(preset.since)
    late = preset.before and parts(version) >= parts(preset.before)
    if early or late:
        return f"{preset.library} {version} is not among the versions seen to take it"
    return ""


def environment(chosen: list[Setting], variables: Texts) -> dict[str, str]:
    """Returns the variables that a process needs besides its own `variables`."""
    taken = [setting for setting in chosen if not setting.left]
    new = {
        setting.name: setting.value
        for setting in taken
        if not setting.name.startswith(XLA)
    }
    if flags := [
        f"--{setting.name}={setting.value}"
        for setting in taken
        if setting.name.startswith(XLA)
    ]:
        new["XLA_FLAGS"] = " ".join([variables.get("XLA_FLAGS", ""), *flags]).strip()
    return new


def choose_step_settings(config: Config, cluster: Cluster) -> list[Setting]:
    """Returns what the step sets in the compiler, whoever starts it."""
    if cluster.accelerator.platform != "gpu":
        return []
    ways = overlaps_reduce_scatter(config), sends_by_table(config)
    options = xla.step_options(config.mesh.devices, config.mesh.tensor, *ways)
    return [
        Setting(option.name, str(option.value), "", option.reason) for option in options
    ]


def installed() -> dict[str, str]:
    """Returns versions by library; none of one that is not installed here."""
    versions = {}
    for library, packages in PACKAGES.items():
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[library] = importlib.metadata.version(package)
    return versions


def to_text(
    config: Config,
    cluster: Cluster,
    versions: Texts,
    variables: Texts,
) -> str:
    """Returns what `plan --flags` prints."""
    there = (
        ", ".join(f"{name} {version}" for name, version in versions.items())
        or "none of the libraries installed"
    )
    lines = [
        f"{config.mesh.devices} x {cluster.accelerator.name}, {config.mesh}, on {cluster.name} ({cluster.topology}); "
        f"{there}",
        "",
    ]
    chosen = settings(config, cluster, versions, variables)
    lines.append("launch sets" if chosen else "launch sets nothing")
    for entry in chosen:
        lines += [
            f"  {entry.name}={entry.value}"
            + (f"   LEFT: {entry.left}" if entry.left else ""),
            f"      {entry.reason}",
            f"      {entry.versions}",
        ]
    if own := choose_step_settings(config, cluster):
        lines += ["", "the step sets, unless XLA_FLAGS does"]
        for entry in own:
            lines += [f"  {entry.name}={entry.value}", f"      {entry.reason}"]
    lines += [
        "",
        "the run sets",
        f"  train.gc_every={config.train.gc_every}",
        f"      {_collection(config)}",
    ]
    lines += ["", "left alone, whatever older advice says"]
    for setting, why in ADVICE.items():
        lines += [f"  {setting}", f"      {why}"]
    return "\n".join(lines)


def _collection(config: Config) -> str:
    if config.train.gc_every:
        return "all processes collect Python's garbage at the same steps; 0 leaves it to each of them"
    return (
        "each process collects Python's garbage when it thinks fit, and all others wait for it; 100 has them "
        "collect together"
    )


def as_json(
    config: Config,
    cluster: Cluster,
    versions: Texts,
    variables: Texts,
) -> dict:
    """Returns what `plan --flags --json` prints."""
    chosen = settings(config, cluster, versions, variables)
    return {
        "versions": dict(versions),
        "set": [asdict(entry) for entry in chosen],
        "environment": environment(chosen, variables),
        "by_the_step": [
            asdict(entry) for entry in choose_step_settings(config, cluster)
        ],
        "by_the_run": [
            {
                "name": "train.gc_every",
                "value": str(config.train.gc_every),
                "reason": _collection(config),
            }
        ],
        "left": [{"setting": setting, "why": why} for setting, why in ADVICE.items()],
    }

"""The real compiler run for described devices, and its bytes beside the planner's.

XLA's GPU compiler needs no GPU: a target description says what it would find. Memory comes from the executable's buffer
assignment, traffic from the collectives in its HLO.
"""

import os
import time as clock
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtrain.config import Config, ConfigError, short
from meshtrain.errors import install_command
from meshtrain.families import FAMILIES
from meshtrain.inputs import LABELS, MIX, OTHER_LABELS, PATCHES, TOKENS, needed
from meshtrain.plan import memory, pipeline, traffic
from meshtrain.plan.estimate import Plan

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from meshtrain.hlo import Module

# Streaming multiprocessors, clock in GHz, L2 and shared memory in bytes, compute capability, memory and its bandwidth:
# NVIDIA A100, H100, H200 and B200 data sheets and the CUDA C++ Programming Guide, section "Compute Capabilities".
GPUS: dict[str, dict[str, Any]] = {
    "a100": dict(
        cores=108,
        clock=1.41,
        l2=41943040,
        shared=167936,
        capability=(8, 0),
        memory=85_000_000_000,
        bandwidth=2039e9,
    ),
    "h100": dict(
        cores=132,
        clock=1.98,
        l2=52428800,
        shared=233472,
        capability=(9, 0),
        memory=85_500_000_000,
        bandwidth=3350e9,
    ),
    "h200": dict(
        cores=132,
        clock=1.98,
        l2=62914560,
        shared=233472,
        capability=(9, 0),
        memory=150_000_000_000,
        bandwidth=4800e9,
    ),
    "b200": dict(
        cores=148,
        clock=1.96,
        l2=132644864,
        shared=233472,
        capability=(10, 0),
        memory=191_000_000_000,
        bandwidth=7700e9,
    ),
}
SMALLEST = 1024  # bytes: metrics and the gradient's norm are not worth a line
CLUSTERS = {"a100": "a100-80"}  # of a target, where it has another name
CUDNN = (9, 8, 0)  # of the described GPUs
PACKAGES = f"jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 ({install_command('compile')})"


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures for one device's step. `total_bytes` is what is alive at the fullest moment."""

    target: str
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    compile_seconds: float
    collectives: list[dict[str, Any]]
    module: "Module"
    mesh: "Mesh"

    @property
    def total_bytes(self) -> int:
        return (
            self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes
        )

    def sent(self) -> dict[str, float]:
        """Bytes that one device sends in a step, by mesh axis."""
        sent = Counter[str]()
        for collective in self.collectives:
            sent[collective["axis"]] += collective["sent_bytes"]
        return dict(sorted(sent.items()))

    def as_json(self) -> dict[str, Any]:
        names = (
            "target",
            "argument_bytes",
            "temp_bytes",
            "output_bytes",
            "alias_bytes",
            "total_bytes",
            "compile_seconds",
            "collectives",
        )
        return {name: getattr(self, name) for name in names}


def parse_target(target: str, devices: int) -> str:
    """The name in TARGET or TARGETxN; ConfigError for an unknown one or another number of devices than the mesh has."""
    name, cross, count = target.lower().partition("x")
    if name not in ("cpu", *GPUS):
        raise ConfigError(
            f"--compile {short(target)}: the target must be one of cpu, {', '.join(GPUS)}, as in --compile "
            f"h100x{devices}."
        )
    if cross and (not count.isdigit() or int(count) != devices):
        raise ConfigError(
            f"--compile {short(target)}: the mesh has {devices} devices, so write {name} or {name}x{devices}."
        )
    return name


def compile_step(config: Config, target: str) -> Compiled:
    """Compiles the train step of a config for `cpu` or a GPU of `GPUS`, which need not be there.

    Must run before JAX has started a backend, since it chooses which. Raises ConfigError where the compiler is not
    installed.
    """
    devices = config.mesh.devices
    name = parse_target(target, devices)
    described = described_devices(name, devices) if name != "cpu" else None
    # Only here, since the rest of the planner needs no JAX devices and starts faster without the model.
    import jax

    from meshtrain import hlo, mesh, step

    if described is None:
        jax.config.update("jax_platforms", "cpu")
        mesh.fake_cpu_devices(devices)
        described = jax.devices("cpu")
    jax_mesh = mesh.make_mesh(config, described)
    program = step.Program(config, jax_mesh)
    lowered = program.lower(program.batch_shapes(_batch(config)))
    start = clock.perf_counter()
    executable = lowered.compile()
    seconds = clock.perf_counter() - start
    memory = executable.memory_analysis()
    text = executable.as_text()
    assert memory is not None and text is not None, (
        "XLA's CPU and GPU compilers both tell what they allocate"
    )
    module = hlo.Module(text)
    return Compiled(
        target=f"{name}x{devices}",
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        compile_seconds=seconds,
        collectives=[
            {
                "kind": c.kind,
                "axis": c.axis,
                "bytes": c.bytes,
                "ranks": c.ranks,
                "trip_count": round(c.times),
                "sent_bytes": c.sent * round(c.times),
                "source": c.source,
            }
            for c in hlo.collectives(module, jax_mesh, program.taken)
        ],
        module=module,
        mesh=jax_mesh,
    )


def _batch(config: Config) -> dict[str, None]:
    """The arrays of a batch, by name."""
    if FAMILIES[config.model.family].images:
        images = config.data.images
        return dict.fromkeys(
            (
                PATCHES,
                LABELS,
                *((OTHER_LABELS, MIX) if images.mixup or images.cutmix else ()),
            )
        )
    packed = (
        ("segments", "positions", "weights") if config.data.batching == "packed" else ()
    )
    arrays = needed(config)
    return dict.fromkeys((TOKENS, LABELS, *packed, *arrays))


def described_devices(name: str, devices: int) -> Sequence[Any]:
    """Described GPUs, eight to a host."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax
    from jax.experimental import topologies

    from meshtrain.compat_kernels import describe_gpu

    jax.config.update("jax_platforms", "cpu,cuda")
    describe_gpu(CUDNN)
    shape = f"1x{-(-devices // 8)}x{min(8, devices)}"
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(name), topology=shape
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--compile {name} needs XLA's CUDA compiler, though no GPU: install {PACKAGES} ({reason})."
        ) from None
    return described.devices


def target_config(name: str) -> str:
    """XLA's description of a GPU (a GpuTargetConfigProto as text)."""
    gpu = GPUS[name]
    major, minor = gpu["capability"]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu["shared"]}
  threads_per_core_limit: 2048
  core_count: {gpu["cores"]}
  fpus_per_core: {64 if name == "a100" else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu["bandwidth"])}
  l2_cache_size: {gpu["l2"]}
  clock_rate_ghz: {gpu["clock"]}
  device_memory_size: {gpu["memory"]}
  shared_memory_per_block_optin: {gpu["shared"] - 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} patch: {CUDNN[2]} }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "NVIDIA {name.upper()}"
"""


def comparison(plan: Plan, compiled: Compiled) -> list[tuple[str, float, float]]:
    """(what, planner's bytes, compiler's bytes), line by line."""
    # of the step alone, whatever drawing answers holds
    platform = plan.cluster.accelerator.platform
    items = memory.items(plan.config, pipeline.facts(plan.config), platform)
    nbytes = memory.total(items)
    between = sum(item.nbytes for item in items if item.between_steps)
    rows = [
        ("state between steps (arguments)", between, float(compiled.argument_bytes)),
        (
            "needed during the step (temporaries)",
            nbytes - between,
            float(compiled.temp_bytes),
        ),
        ("held in all", nbytes, float(compiled.total_bytes)),
    ]
    planned = traffic.by_axis(plan.transfers)
    compiled_sent = compiled.sent()
    rows += [
        (f"sent over {axis}", planned.get(axis, 0.0), compiled_sent.get(axis, 0.0))
        for axis in sorted({*planned, *compiled_sent})
    ]
    return [row for row in rows if max(row[1:]) >= SMALLEST]

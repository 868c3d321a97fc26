"""Mixtures of experts: published runs in bfloat16 beside the plan, `python -m experiments.plan.experts`.

    Megatron-Bridge   NVIDIA-NeMo/Megatron-Bridge (2026): docs/performance-summary-archive.md and, of Qwen3-30B on 16 H100s, which differ in how
                      rows are sent alone, skills/nemo-mbridge-perf-expert-parallel-overlap; loads are even by force.
                      gpt-oss-120B on 64 H100s is the mean of four releases, 5,810 to 5,993
    JaxPP             marin-community/marin, issue 7024: 67B-A2B (issue 6044 has its sizes), DualPipeV, everything computed again
    marin             the same, issue 6979: FSDP without expert parallelism, everything computed again; 203 to 210 thousand tokens/s on 8
    AutoModel         NVIDIA-NeMo/Automodel (2026), its performance summary: DeepSeek-V3 on 1,024 and 256 H100s, PP 4 of 8 chunks, EP 64, and
                      Kimi-K2 on 256, PP 8 of 4 chunks, EP 32; rows sent by DeepEP
    DeepSeek          DeepSeek-AI 2024, sections 1, 3.2 and 4.2: 180 thousand hours of H800s for 10^12 tokens on 2,048 of them, PP 16, EP 64,
                      DualPipe, in float8, which experts' products do not have here: the plan has theirs in bfloat16
    MaxText           its docs/reference/models/tiering.md; sequences a chip: AI-Hypercomputer/tpu-recipes, training/v5p/Mixtral-8X7B-Maxtext
    ModelZoo          yanring/Megatron-MoE-ModelZoo, best_practice/qwen3: NVIDIA's Megatron on 256 H100s, loads even by force
    XTuner            InternLM/xtuner, docs/en/benchmark/megatron_moe_benchmark.md: Megatron on 256 H800s, loads even by force, no CUDA graphs
    dgxc              NVIDIA/dgxc-benchmarking, v25.12, qwen3/pretrain/README.md: its example of a run

How they send rows to experts, and what else their profiles have:

    all-to-all     each row to each of its experts, and sorted by expert before and behind it
    HybridEP       once to each node and there to each device, by kernels that put it where the experts take it
    overlap        beside the products of another microbatch; of the seconds of messages 44% are hidden in both (24.7 s less 21.1 of 8.3, as its
                   profile has them, and 41.3 less 31.3 of 22.8, as planned), as many as of tensor parallelism's:
                   `Efficiency.exposed_tensor`
    waits          the host copies the counts of rows from the device and waits for them before a layer's experts
                   (megatron/core/transformer/moe/token_dispatcher.py), by HybridEP too (hybrid_ep_buffer.py, `non_blocking`);
                   0.2 ms is assumed
    launches       the host launches some hundreds of kernels a layer, router, permutation and grouped products, of which CUDA graphs
                   take most away: the recipes of Qwen3-30B and of GB200s have these, those of gpt-oss do not. 5 ms a pass:
                   fitted on ModelZoo's rows, judged on XTuner's, dgxc's and gpt-oss's
    biases         Megatron adds gpt-oss's to the experts' outputs by kernels of their own, expert by expert, in float32: 32 bytes of an element
                   forward (b p, its sum with the output, all of them joined, and rounded), 36 backward
                   (megatron/core/transformer/moe/experts.py)
    Grug's norms   are gated (Qiu et al. 2026): the norm, read by a product, the gate written and multiplied, 14 bytes; an output of attention
                   loses what is parallel to v and is gated by head, 10 a layer, so 5 a norm; logits of 8,192 tokens at
                   a time (pull request 6572)

Left out: other rows in float8, and TPU v6e.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments import bench
from experiments.bench import MODELS, Table, config_of
from meshtrain.config import Config, load, replaced
from meshtrain.plan import FrameworkProfile, named, plan
from meshtrain.plan.experts import expert_seconds, reached

from .dgxc import NEMO
from .published import Run
from .tpu import MAXTEXT

ALL_TO_ALL = replace(
    NEMO, imbalance=1.0, bias_bytes=(0.0, (32 + 36) / 3), expert_wait=2e-4
)
LAUNCHED = replace(ALL_TO_ALL, expert_launch=5e-3)
HYBRID_EP = replace(ALL_TO_ALL, token_per_node=True)
DEEP_EP = replace(HYBRID_EP, execution="asynchronous", overlap_data=True)
GRUG = FrameworkProfile(overlap_data=True, imbalance=1.0, norm_bytes=19.0)
OF_TPU = replace(MAXTEXT, imbalance=1.0)

# of gpt-oss norms and the experts' activation are computed again
KEPT = {
    "remat": "names",
    "remat_keep": ["qkv", "attention", "attention_out", "mlp_in", "dispatched"],
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "norms, activation": KEPT,
    "norms, experts": {"remat": "names", "remat_keep": KEPT["remat_keep"][:3]},
    "all": {"remat": "full"},
}
# Megatron on 256 GPUs, Qwen3-235B, rows of 4,096: source, GPU, how rows are sent, (tensor, expert, pipeline, chunks),
# sequences a step and a microbatch, what is computed again, seconds
MEGATRON = (
    ("ModelZoo", "h100", "DeepEP", (2, 32, 8, 4), (2048, 1), "norms, activation", 19.7),
    ("ModelZoo", "h100", "DeepEP, overlap", (2, 32, 8, 4), (2048, 1), "norms, activation", 17.6),
    ("ModelZoo", "h100", "DeepEP", (2, 8, 1, 1), (2048, 4), "all", 17.6),
    ("ModelZoo", "h100", "DeepEP", (4, 8, 8, 4), (2048, 1), "nothing", 29.0),
    ("ModelZoo", "h100", "all-to-all", (2, 8, 32, 3), (2048, 1), "norms, activation", 24.2),
    ("XTuner", "h800", "all-to-all", (4, 8, 8, 4), (2048, 1), "nothing", 35.481),
    ("XTuner", "h800", "all-to-all", (2, 32, 8, 4), (2048, 1), "norms, activation", 35.392),
    ("XTuner", "h800", "DeepEP", (2, 32, 8, 4), (2048, 1), "norms, activation", 25.73),
    ("XTuner", "h800", "all-to-all", (2, 8, 8, 1), (2048, 1), "norms, activation", 27.555),
    ("XTuner", "h800", "all-to-all", (2, 8, 32, 3), (2048, 1), "norms, activation", 22.42),
    ("XTuner", "h800", "all-to-all", (1, 8, 32, 3), (2048, 1), "norms, experts", 22.946),
    ("XTuner", "h800", "all-to-all", (1, 8, 32, 3), (4096, 4), "all", 42.537),
    ("XTuner", "h800", "all-to-all", (1, 8, 32, 3), (8192, 8), "all", 86.186),
    ("XTuner", "h800", "all-to-all", (2, 8, 32, 3), (4096, 4), "all", 43.495),
    ("XTuner", "h800", "all-to-all", (2, 8, 32, 1), (8192, 4), "all", 92.652),
    ("dgxc", "h100", "all-to-all, overlap", (2, 32, 8, 4), (2048, 1), "nothing", 25.532),
)  # fmt: skip
# Kernels that send a row once to a node: library, GPU, ranks, groups of experts and those taken, GB/s of dispatch and
# combine in bfloat16. 4,096 tokens of 7,168, 8 experts each; bytes are counted once a node, of one node once a device,
# its own among them. deepseek-ai/DeepEP: docs/legacy.md (its dispatch is in float8, so its combine stands twice), and
# branch hybrid-ep, docs/README_Hybrid-EP.md, 16 multiprocessors, by torch's API.
KERNELS = (
    ("DeepEP", "h800", 8, (1, 1), 158, 158),
    ("DeepEP", "h800", 16, (2, 2), 43, 43),
    ("DeepEP", "h800", 32, (4, 4), 57, 57),
    ("DeepEP", "h800", 64, (8, 4), 50, 50),
    ("HybridEP", "h100", 16, (1, 1), 54.47, 53.35),
    ("HybridEP", "h100", 32, (1, 1), 47.36, 52.53),
    ("HybridEP", "h100", 64, (1, 1), 41.24, 46.57),
    ("HybridEP", "gb200", 8, (1, 1), 550.10, 538.44),
    ("HybridEP", "gb200", 16, (1, 1), 472.84, 474.48),
    ("HybridEP", "gb200", 32, (1, 1), 485.50, 423.19),
)  # fmt: skip


def _run(
    source: str,
    name: str,
    accelerator: str,
    profile: FrameworkProfile,
    reported: float,
    config: Config,
) -> Run:
    """`reported`: tokens/s a device."""
    train, devices = config.train, config.mesh.devices
    seconds = train.global_batch_size * train.sequence_length / devices / reported
    title = f"{name} on {devices}"
    told = f"{reported:,.0f}"
    return Run(source, title, config, accelerator, profile, seconds, told)


def of_experts(
    model: str, mesh: dict[str, int], rows: int, length: int, **parallel: Any
) -> Config:
    """Returns a config in bfloat16, without room for more rows than an even load has where experts are spread."""
    given: dict[str, Any] = {"vocab": "edge"} | parallel
    if mesh.get("expert", 1) > 1:
        given["experts"] = {"dispatch": "all_to_all", "capacity": 1.0}
    return config_of(MODELS["experts"][model], mesh, rows, length, given)


def runs() -> Iterator[Run]:
    """Yields every row that the issue names, each within a fifth."""
    mesh = {"data": 16, "expert": 16}
    config = of_experts(
        "Qwen3-30B-A3B", mesh, 1024, 4096, microbatches=64, zero_stage=1
    )
    for how, profile, seconds in (
        ("all-to-all", ALL_TO_ALL, 41.25),
        ("all-to-all, overlap", replace(ALL_TO_ALL, overlap_expert=True), 31.31),
        ("HybridEP", HYBRID_EP, 24.7138),
        ("HybridEP, overlap", replace(HYBRID_EP, overlap_expert=True), 21.0725),
    ):
        reported = 1024 * 4096 / 16 / seconds
        name = f"Qwen3-30B {how}"
        yield _run("Megatron-Bridge", name, "h100", profile, reported, config)
    staged = KEPT | {"schedule": "1f1b", "zero_stage": 1}
    mesh = {"data": 16, "expert": 8, "pipeline": 4}
    for rows, microbatches, reported in ((1280, 80, 5903), (512, 8, 5630)):
        staged["microbatches"] = microbatches
        name = f"gpt-oss, {rows // 16 // microbatches} rows"
        config = of_experts("gpt-oss-120B", mesh, rows, 4096, **staged)
        yield _run("Megatron-Bridge", name, "h100", LAUNCHED, reported, config)
    yield of_deepseek("DeepSeek-V3", (256, 64, 4), 8192, 865)
    v_shaped = {"microbatches": 32, "schedule": "v_1f1b", "zero_stage": 1}
    mesh = {"data": 8, "expert": 8, "pipeline": 8}
    config = of_experts("67B-A2B", mesh, 256, 8192, remat="full", **v_shaped)
    grug = replace(GRUG, execution="asynchronous")
    yield _run("JaxPP", "67B-A2B", "h100", grug, 9427, by_chunks(config))
    fsdp = {"microbatches": 1, "remat": "full", "zero_stage": 3}
    config = of_experts("d2048", {"data": 8}, 256, 4096, **fsdp)
    yield _run("marin", "d2048", "h100", GRUG, 26250, by_chunks(config))
    config = of_experts("Mixtral 8x7B", {"data": 128}, 36 * 128, 4096, **fsdp)
    yield _run("MaxText experts", "Mixtral 8x7B", "tpu-v5p", OF_TPU, 2909, config)


def by_chunks(config: Config) -> Config:
    """Returns a config whose loss is computed for 8,192 tokens at a time."""
    return replaced(config, train={"loss_chunk": 8192})


def others() -> Iterator[Run]:
    """Yields rows of other machines, which do not say how they send; of B200s nothing was fitted."""
    for accelerator, expert, length, microbatches, reported in (
        ("gb200", 64, 4096, 5, 16640),
        ("gb200", 64, 8192, 20, 15876),
        ("b200", 8, 4096, 5, 13568),
    ):
        keys = KEPT | {"microbatches": microbatches, "zero_stage": 1}
        mesh = {"data": 64, "expert": expert}
        config = of_experts("gpt-oss-120B", mesh, 1280, length, **keys)
        name = f"gpt-oss, {length:,} tokens"
        yield _run("Megatron-Bridge", name, accelerator, LAUNCHED, reported, config)
    keys = {"microbatches": 256, "schedule": "interleaved", "virtual_stages": 3}
    mesh = {"data": 32, "expert": 32, "pipeline": 8}
    config = of_experts("Qwen3-235B-A22B", mesh, 8192, 4096, zero_stage=1, **keys)
    yield _run("Megatron-Bridge", "Qwen3-235B", "gb200", ALL_TO_ALL, 4916, config)


def of_deepseek(
    name: str, mesh: tuple[int, int, int], rows: int, reported: float
) -> Run:
    """Returns a row of AutoModel, of (data, expert, pipeline): chunks of two layers, everything computed again."""
    data, expert, stages = mesh
    config = of_experts(
        name,
        {"data": data, "expert": expert, "pipeline": stages},
        rows,
        4096,
        microbatches=rows // data,
        schedule="interleaved",
        virtual_stages=32 // stages,
        remat="full",
        zero_stage=1,
    )
    return _run("AutoModel", name, "h100", DEEP_EP, reported, config)


def deepseeks() -> Iterator[Run]:
    """Yields more rows of DeepSeek's class, which are in no figure of all sources together."""
    yield of_deepseek("DeepSeek-V3", (64, 64, 4), 512, 1002)
    yield of_deepseek("Kimi-K2", (32, 32, 8), 512, 924)
    keys = {"remat": "selective", "zero_stage": 1, "microbatches": 64}
    keys |= {"schedule": "interleaved", "virtual_stages": 4}
    mesh = {"data": 64, "expert": 64, "pipeline": 4}
    config = of_experts("DeepSeek-V3", mesh, 4096, 4096, **keys)
    yield _run("Megatron-Bridge", "DeepSeek-V3", "gb200", HYBRID_EP, 3139, config)
    keys = {"remat": "selective", "zero_stage": 1, "microbatches": 120}
    mesh = {"data": 128, "expert": 64, "pipeline": 16}
    config = of_experts("DeepSeek-V3", mesh, 15360, 4096, schedule="paired", **keys)
    float8 = {"matmul": "float8", "float8_recipe": "blockwise"}
    config = replaced(config, precision=float8)
    hidden = replace(DEEP_EP, overlap_expert=True)
    reported = 1e12 / (180e3 * 3600)
    yield _run("DeepSeek", "DeepSeek-V3", "h800", hidden, reported, config)


def megatrons() -> Iterator[Run]:
    """Yields rows of Megatron, on which nothing but the launches was fitted, and those on ModelZoo's alone."""
    for source, accelerator, how, layout, (rows, each), again, seconds in MEGATRON:
        tensor, expert, stages, chunks = layout
        data = 256 // tensor // stages
        parallel: dict[str, Any] = {
            "microbatches": rows // data // each,
            "zero_stage": 1,
        }
        if stages > 1:
            # embedding and head stand for a layer each, of 96
            layers = 96 // stages // chunks
            split = [layers] * (stages * chunks)
            split[0] = split[-1] = layers - 1
            schedule = "interleaved" if chunks > 1 else "1f1b"
            parallel |= {"schedule": schedule, "virtual_stages": chunks}
            parallel["layer_split"] = split
        profile = replace(
            LAUNCHED,
            token_per_node=how.startswith("DeepEP"),
            overlap_expert=how.endswith("overlap"),
            overlap_tensor=False,
            overlap_pipeline=chunks > 1,
        )
        mesh = {"data": data, "expert": max(1, expert // tensor)}
        mesh |= {"tensor": tensor, "pipeline": stages}
        parallel |= {"sequence_parallel": tensor > 1} | RECOMPUTED[again]
        config = of_experts("Qwen3-235B-A22B", mesh, rows, 4096, **parallel)
        name = f"{' x '.join(map(str, layout))} of {each}, {how}"
        reported = rows * 4096 / 256 / seconds
        yield _run(source, name, accelerator, profile, reported, config)
    keys = {"microbatches": 16, "zero_stage": 3, "zero_hold": True, "remat": "full"}
    mesh = {"data": 8, "expert": 8}
    config = of_experts("Qwen3-30B-A3B", mesh, 512, 4096, **keys)
    yield _run("AutoModel", "Qwen3-30B", "h100", DEEP_EP, 12040, config)


def kernels() -> Iterator[tuple[str, float, float]]:
    """Yields kernels that send a row once to a node, with the seconds they took there and back, and as planned."""
    for library, accelerator, ranks, groups, *rates in KERNELS:
        cluster = named(accelerator, ranks)
        experts = 256 if library == "DeepEP" else 8 * ranks
        mesh = {"data": ranks, "expert": ranks}
        config = of_experts("DeepSeek-V3", mesh, ranks, 4096)
        moe = replace(config.model.moe, experts=experts, groups=groups)
        config = replaced(config, model={"moe": moe})
        nodes = ranks // cluster.links.node.devices
        blocks = nodes if nodes > 1 else ranks
        nbytes = 4096 * 7168 * 2 * blocks * reached(config.model.moe, experts // blocks)
        measured = sum(nbytes / rate / 1e9 for rate in rates)
        planned, _ = expert_seconds(config, cluster, HYBRID_EP)
        yield f"{library} on {ranks} {accelerator}", measured, planned


def table() -> None:
    """Prints the rows, kernels, and what our program would win by sending a row to a node once."""
    heads = ("GPU     ", "tokens/s a device", "planned", "off by", "waits for experts")
    rows = Table("source         ", "run                         ", *heads)
    for run in (*runs(), *others(), *megatrons(), *deepseeks()):
        found = plan(
            run.config, named(run.accelerator, run.config.mesh.devices), run.profile
        )
        planned = (
            found.tokens_per_second / found.devices * found.seconds / run.predicted()
        )
        figures = (
            f"{planned:,.0f}",
            f"{run.predicted() / run.seconds - 1:+.1%}",
            f"{found.time.expert / found.seconds:.0%}",
        )
        rows.row(run.source, run.name, run.accelerator, run.reported, *figures)
    rows = Table("a row to a node once", "measured ms", "planned", "off by")
    for name, measured, planned in kernels():
        error = f"{planned / measured - 1:+.1%}"
        rows.row(name, f"{1e3 * measured:.2f}", f"{1e3 * planned:.2f}", error)
    a_row = ["parallel.microbatches=64", "parallel.remat=selective"]
    first = [*a_row, "parallel.zero_stage=1"]
    once = ["parallel.experts.ranks_per_node=8"]
    kept = [
        *first,
        "parallel.remat=names",
        f"parallel.remat_keep=[{','.join(KEPT['remat_keep'])}]",
    ]
    for ranks, words, more in (
        (1, [], ""),
        (8, [], ""),
        (16, [], ""),
        (16, once, ", a row to a node once"),
        (16, a_row, ", of a row a microbatch"),
        (16, a_row + once, ", of a row a microbatch, to a node once"),
        (16, first, ", of a row a microbatch, ZeRO-1"),
        (16, first + once, ", of a row a microbatch, ZeRO-1, to a node once"),
        (16, kept + once, ", the same, rows in slots kept"),
    ):
        config = load("configs/qwen3_30b_a3b.yaml", [f"mesh.expert={ranks}", *words])
        found = plan(config, named("h100", 16))
        waits = f"{found.seconds:.1f} s, of them {found.time.expert:.1f} waiting for experts"
        held = f"{found.bytes / 2**30:.1f} GiB"
        print(f"ours, Qwen3-30B, experts over {ranks}{more}: {waits}; {held}")


def main() -> None:
    bench.parser(__doc__).parse_args()
    table()


if __name__ == "__main__":
    main()

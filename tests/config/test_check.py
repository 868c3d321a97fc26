"""Legal combinations pass, whatever else they cost; what costs something is noted.

(What is refused: tests/test_config.py.)
"""

import re

import pytest
import yaml
from refusals import tells

from meshtrain.config import Config, ConfigError, chosen, load, notes, replaced, to_yaml
from meshtrain.config.follow import as_run_on
from meshtrain.config.notes import WORTH_SAYING
from meshtrain.plan import plan
from meshtrain.schedule.generators import SCHEDULES, legal_chunks, make_table
from meshtrain.schedule.simulation import Durations, simulate


def configuration(**sections: dict) -> Config:
    model = {"layers": 4, "d_model": 48, "heads": 6, "d_ff": 96, "vocab_size": 264}
    return load({**sections, "model": {**model, **sections.get("model", {})}})


def test_rows_that_fill_up_a_batch_are_noted_with_their_price():
    assert notes(load({})) == []
    sections = {
        "mesh": {"data": 4},
        "parallel": {"microbatches": 2},
        "train": {"global_batch_size": 10},
    }
    with pytest.raises(
        ConfigError, match=r"mesh\.data 4 .* 10, .*train\.uneven_batch: pad"
    ):
        configuration(**sections)
    sections["train"]["uneven_batch"] = "pad"
    (note,) = notes(configuration(**sections))
    assert re.search(r"mesh\.data 4 x .*microbatches 2: .* 16 rows, 60\.0% more", note)


def test_the_tokens_of_a_step_are_counted_with_the_rows_that_fill_it_up():
    huge = {
        "global_batch_size": 2**20 - 1,
        "sequence_length": 2048,
        "uneven_batch": "pad",
    }
    assert notes(configuration(train=huge)) == []
    with pytest.raises(
        ConfigError,
        match=r"1048575 \(padded to 1,048,576\) x .* is 2,147,483,648 tokens a step",
    ):
        configuration(train=huge, mesh={"data": 2})


@pytest.mark.parametrize("schedule", ["v_1f1b", "interleaved", "1f1b", "zb_h1"])
def test_every_schedule_runs_on_one_stage_whatever_its_chunks(schedule):
    """There is no table then: chunks that the layers could not fill, and a split of the layers, have no use."""
    assert (
        notes(configuration(model={"layers": 1}, parallel={"schedule": schedule})) == []
    )
    unused = {"schedule": schedule, "virtual_stages": 3, "layer_split": [3, 4]}
    found = [
        note.split(" has no use with mesh.pipeline 1")[0]
        for note in notes(configuration(model={"layers": 1}, parallel=unused))
    ]
    assert found == ["parallel.virtual_stages", "parallel.layer_split"]


def test_a_key_on_which_nothing_depends_is_noted_where_it_was_given():
    unused = {
        "model": {"moe": {"top_k": 4}},
        "parallel": {"context_strategy": "ring"},
        "precision": {"float8_recipe": "blockwise", "gradient_sums": "bfloat16"},
        "telemetry": {"experts_every": 3},
    }
    keys = [
        f"{section}.{key}"
        for section, values in unused.items()
        for key in values
        if key != "moe"
    ]
    found = notes(configuration(**unused))
    assert sorted(note.split(" has no use here")[0] for note in found) == sorted(
        ["model.moe.top_k", *keys]
    )
    unused["model"]["moe"]["experts"] = 8
    unused["precision"]["matmul"] = "float8"
    unused["parallel"]["microbatches"] = 2
    used = {
        "mesh": {"context": 2},
        "train": {"global_batch_size": 4, "sequence_length": 64},
    }
    assert not [note for note in notes(load(unused | used)) if "has no use" in note]


@pytest.mark.parametrize(
    "model, others, says",
    [
        (
            {"moe": {"experts": 8, "balance": "batch"}},
            {},
            "loss over a batch ... microbatches",
        ),
        ({"moe": {"experts": 8, "balance": "bais"}}, {}, "did you mean bias?"),
        (
            {"moe": {"experts": 12}},
            {"mesh": {"data": 4, "expert": 3}},
            "legal are 1, 2, 4.",
        ),
        (
            {"moe": {"experts": 12}},
            {"mesh": {"data": 2, "context": 4, "expert": 6}},
            "mesh.data 2; legal are 1, 2, ... mesh.context 4 times",
        ),
        (
            {"moe": {"experts": 12}},
            {"mesh": {"context": 4, "expert": 2}},
            "mesh.data 1; legal are 1, ... mesh.context 4 times",
        ),
        (
            {"moe": {"experts": 6}},
            {"mesh": {"data": 4, "expert": 4}},
            "legal are 1, 2, 3, 6.",
        ),
        ({}, {"mesh": {"data": 2, "expert": 2}}, "the model has no experts"),
        ({}, {"parallel": {"experts": {"capacity": 1.0}}}, "the model has no experts"),
        (
            {"moe": {"experts": 8}},
            {
                "mesh": {"data": 4, "expert": 4},
                "parallel": {"experts": {"ranks_per_node": 3}},
            },
            "4 ranks that share experts; legal are 1, 2, 4.",
        ),
        (
            {"moe": {"experts": 8}},
            {
                "mesh": {"data": 4, "expert": 4},
                "parallel": {
                    "experts": {"ranks_per_node": 2, "dispatch": "all_gather"}
                },
            },
            "dispatch is all_gather; legal is all_to_all.",
        ),
        ({"family": "gpt2", "moe": {"experts": 8}}, {}, "not gated, or has biases"),
        ({"moe": {"experts": 8, "top_k": 9}}, {}, "legal are at most so many"),
        ({"d_ff": 99, "moe": {"experts": 8}}, {}, "leave model.d_ff out"),
        (
            {"moe": {"experts": 8, "groups": [3, 1], "router": "sigmoid"}},
            {},
            "groups that divide the 8 experts",
        ),
        (
            {"moe": {"experts": 8}},
            {
                "mesh": {"data": 4, "expert": 2},
                "parallel": {"reduce": {"compression": "int8"}},
            },
            "a residual of each",
        ),
        (
            {"moe": {"experts": 8}},
            {"lora": {"rank": 2, "targets": ["up"]}},
            "projections of llama are q, k, v, out.",
        ),
    ],
)
def test_what_experts_cannot_be_is_refused_in_a_sentence(model, others, says):
    with pytest.raises(ConfigError) as refused:
        load({"model": {"layers": 2, "d_model": 24, "heads": 4, **model}, **others})
    assert tells(str(refused.value), says) and str(refused.value)[-1] in ".?"


IN_SEQUENCE = {
    "parallel": {"sequence_parallel": True},
    "train": {"sequence_length": 40},
}


@pytest.mark.parametrize(
    ("axis", "size", "sections"),
    [("tensor", 4, {}), ("data", 5, {}), ("tensor", 3, IN_SEQUENCE)],
)
def test_every_size_offered_as_legal_is_legal(axis, size, sections):
    """The numbers in the sentences can be taken at their word."""
    with pytest.raises(ConfigError) as refused:
        configuration(mesh={axis: size}, **sections)
    legal = re.split("legal (?:for mesh.tensor )?are ", str(refused.value))[1]
    offered = legal.partition(", or set")[0].rstrip(".").split(", ")
    assert len(offered) > 1
    for number in offered:
        configuration(mesh={axis: int(number)}, **sections)


@pytest.mark.parametrize(
    ("mesh", "parallel", "says"),
    [
        (
            {"data": 4, "islands": 4},
            {"zero_stage": 3},
            r"parallel\.zero_stage 3 shards nothing: .* 4 islands",
        ),
        (
            {"data": 4, "islands": 2},
            {"zero_stage": 0},
            r"mesh\.islands 2 .*no use .*zero_stage 0",
        ),
    ],
)
def test_islands_that_leave_zero_nothing_to_do_are_noted(mesh, parallel, says):
    (note,) = notes(configuration(mesh=mesh, parallel=parallel))
    assert re.match(says, note)
    assert (
        notes(configuration(mesh={"data": 4, "islands": 2}, parallel={"zero_stage": 3}))
        == []
    )
    assert notes(configuration(mesh={"data": 4}, parallel=parallel)) == []


def test_a_warm_up_that_outlasts_the_run_is_noted():
    found = notes(load({"train": {"steps": 5}, "optimizer": {"warmup_steps": 10}}))
    assert any(re.search(r"warmup_steps 10 .*train\.steps 5", note) for note in found)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (
            {"schedule": "1f1b"},
            [
                "microbatches 2",
                "mesh.pipeline 4",
                "idles 60% of the step",
                "16 would bring that to 16%.",
            ],
        ),
        # of 9 turns of a chunk, 5 without work: the ring is partly empty in the second round too
        (
            {"schedule": "interleaved", "virtual_stages": 2},
            ["idles 56% of the step", "16 would bring that to 9%."],
        ),
    ],
)
def test_fewer_microbatches_than_stages_are_noted_with_their_cost(parallel, says):
    parallel = {"microbatches": 2, **parallel}
    (note,) = notes(
        configuration(mesh={"pipeline": 4}, parallel=parallel, model={"layers": 8})
    )
    assert all(part in note for part in says), note
    table = make_table(parallel["schedule"], 4, 2, parallel.get("virtual_stages", 1))
    assert f"{simulate(table, Durations()).bubble_fraction:.0%}" in note


def test_a_table_of_ones_own_is_noted_with_its_own_cost_and_not_left_unused_on_one_stage(
    tmp_path,
):
    path = tmp_path / "mine.csv"
    parallel = {"microbatches": 2, "schedule": str(path)}

    def of(table: str, stages: int, pipeline: int) -> list[str]:
        path.write_text(make_table(table, stages, 2).to_csv())
        return notes(configuration(mesh={"pipeline": pipeline}, parallel=parallel))

    (note,) = of("gpipe", 4, 4)
    assert "every stage idles 60% of the step; " in note
    with pytest.raises(
        ConfigError, match=r"mine\.csv is for stages=2, .*stages=1.*\.$"
    ):
        of("1f1b", 2, 1)
    assert of("1f1b", 2, 2) == []
    (note,) = of("1f1b", 1, 1)
    assert re.match(r"parallel\.schedule .*no use .*mesh\.pipeline 1: ", note)


LOOKED = "no such file, neither beside the config that names it nor in the working directory {here}"


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("pars.csv", f"{LOOKED}; did you mean pairs.csv?"),
        ("sub/pars.csv", f"{LOOKED}; did you mean sub/pears.csv?"),
        ("no/pairs.csv", f"{LOOKED}."),
        (f"{'a' * 300}/a.csv", f"{LOOKED}."),
        ("{here}/pars.csv", "no such file; did you mean {here}/pairs.csv?"),
    ],
)
def test_a_table_that_is_not_there_is_told_where_it_was_looked_for(
    named, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for name in ("pairs.csv", "pars.txt", "sub/pears.csv"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        configuration(parallel={"schedule": named.format(here=tmp_path)})
    assert str(refused.value).partition(", but there is ")[2] == says.format(
        here=tmp_path
    )


@pytest.mark.parametrize(
    ("layers", "parallel", "runs", "says"),
    [
        (
            8,
            {},
            ("interleaved", 4),
            ["schedule: auto -> interleaved, 4 virtual stages"],
        ),
        (2, {}, ("1f1b", 1), ["schedule: auto -> 1f1b"]),
        (8, {"microbatches": 1}, ("1f1b", 1), ["schedule: auto -> 1f1b"]),
        # what is given wins
        (
            8,
            {"virtual_stages": 2},
            ("interleaved", 2),
            ["schedule: auto -> interleaved, 2 virtual stages"],
        ),
        (
            6,
            {"layer_split": [1, 2, 2, 1]},
            ("interleaved", 2),
            ["schedule: auto -> interleaved, 2 virtual stages"],
        ),
        (5, {"layer_split": [1, 4]}, ("1f1b", 1), ["schedule: auto -> 1f1b"]),
        # a schedule that is named is unchanged
        (8, {"schedule": "1f1b"}, ("1f1b", 1), []),
        (8, {"schedule": "interleaved"}, ("interleaved", 1), []),
        (8, {"schedule": "zb_h1"}, ("zb_h1", 1), []),
        (8, {"schedule": "v_1f1b"}, ("v_1f1b", 2), []),
    ],
)
def test_an_open_schedule_is_chosen_once_and_said(layers, parallel, runs, says):
    sections = {
        "mesh": {"pipeline": 2},
        "parallel": {"microbatches": 4} | parallel,
        "model": {"layers": layers},
    }
    config = configuration(**sections)
    assert (config.parallel.schedule, config.parallel.virtual_stages) == runs
    assert chosen(config) == says
    assert load(config) == load(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("model", "chunks"),
    [
        ({"layers": 16, "pattern": ["linear", "full"]}, 4),
        ({"layers": 8, "pattern": ["full", "full"]}, 4),
        ({"layers": 4, "pattern": ["linear", "full"]}, 1),
        ({"layers": 9, "pattern": ["linear", "full"]}, 1),
        (
            {
                "layers": 8,
                "d_ff": None,
                "dense_layers": 1,
                "dense_d_ff": 64,
                "moe": {"experts": 4},
            },
            1,
        ),
    ],
)
def test_chunks_that_nobody_asked_for_all_have_the_same_kinds_of_layers(model, chunks):
    """Else every chunk would have slots for kinds that it has no layer of."""
    config = configuration(
        mesh={"pipeline": 2}, parallel={"microbatches": 4}, model=model
    )
    assert config.parallel.virtual_stages == chunks


def test_an_open_strategy_of_context_is_chosen_once_and_said():
    def sized(model=(), parallel=(), **mesh):
        model = {"d_model": 64, "heads": 4, "kv_heads": 2, **dict(model)}
        mesh, train = {"context": 2} | mesh, {"sequence_length": 4096}
        return configuration(
            mesh=mesh, model=model, train=train, parallel=dict(parallel)
        )

    heads, window = sized({"window": 64}), sized({"window": 64}, tensor=4)
    assert [c.parallel.context_strategy for c in (heads, window)] == [
        "ulysses",
        "all_gather",
    ]
    (why,) = chosen(heads)
    assert re.fullmatch(
        r"context: auto -> ulysses: .* plan .* all_gather; ring cannot .*",
        why,
    )
    (why,) = chosen(window)
    assert why.endswith("; ring and ulysses cannot be here")
    named = (
        replaced(window, parallel={"context_strategy": "all_gather"}),
        replaced(window, mesh={"tensor": 1}),
    )
    assert [c.parallel.context_strategy for c in named] == ["all_gather", "ulysses"]
    assert (
        chosen(replaced(heads, parallel={"context_strategy": "all_gather"}))
        == chosen(configuration())
        == []
    )
    assert load(yaml.safe_load(to_yaml(heads))) == heads


def test_an_open_schedule_follows_the_mesh_and_a_named_one_does_not():
    config = configuration(parallel={"microbatches": 4}, model={"layers": 8})
    assert (
        config.parallel.schedule,
        config.parallel.virtual_stages,
        chosen(config),
    ) == (
        "auto",
        1,
        [],
    )
    found = [replaced(config, mesh={"pipeline": p}).parallel for p in (4, 2, 8)]
    assert [(p.schedule, p.virtual_stages) for p in found] == [
        ("interleaved", 2),
        ("interleaved", 4),
        ("1f1b", 1),
    ]
    chunked = replaced(config, mesh={"pipeline": 2})
    assert replaced(chunked, mesh={"pipeline": 4}).parallel.virtual_stages == 2
    named = configuration(
        parallel={"microbatches": 4, "schedule": "1f1b"}, model={"layers": 8}
    )
    assert replaced(named, mesh={"pipeline": 4}).parallel.schedule == "1f1b"


def test_an_open_schedule_has_pairs_where_the_plan_finds_them_faster_and_they_fit(
    tmp_path,
):
    """On H100s; not on CPU devices, which hide no messages, whether the config or the machine says that they are."""

    def of(run=(), model=(), **keys):
        model = {
            "layers": 8,
            "d_model": 4096,
            "heads": 32,
            "kv_heads": 8,
            "d_ff": 14336,
            "vocab_size": 4096,
        } | dict(model)
        mesh = {
            "tensor": keys.pop("tensor", 4),
            "pipeline": keys.pop("pipeline", 2),
            "cluster": keys.pop("cluster", None),
        }
        return configuration(
            run=dict(run),
            mesh=mesh,
            model=model,
            parallel={"microbatches": 8, "sequence_parallel": mesh["tensor"] > 1}
            | keys,
            precision={"compute": "bfloat16"},
            train={"global_batch_size": 8, "sequence_length": 4096},
        )

    def schedule(config):
        return config.parallel.schedule, config.parallel.virtual_stages

    pairs = of(pipeline=2, virtual_stages=2)
    assert schedule(pairs) == ("paired", 2)
    (why,) = chosen(pairs)
    assert re.fullmatch(
        r"schedule: auto -> paired, 2 .*: .* [\d.]+% less .*interleaved, "
        r"[\d.]+% (less|more) .*zb_paired, .*",
        why,
    )
    assert not re.search(r"\d (s|ms|min)\b", why), "the plan tells the step"
    same = load(yaml.safe_load(to_yaml(pairs)))
    assert same == pairs and schedule(replaced(same, mesh={"tensor": 1})) == (
        "interleaved",
        2,
    )
    by_plan = {
        name: plan(of(schedule=name, virtual_stages=2), "h100")
        for name in ("interleaved", "paired")
    }
    assert (
        plan(pairs).seconds
        == by_plan["paired"].seconds
        < 0.97 * by_plan["interleaved"].seconds
    )
    one_stage = of(pipeline=1)
    assert (
        schedule(one_stage) == ("paired", 1) and "without pairs" in chosen(one_stage)[0]
    )
    # no messages, no backward beside a forward, nothing gained by the plan, no room for what pairs hold more, another
    # one is named
    for alone in (of(tensor=1), of(pipeline=1, microbatches=1)):
        assert not SCHEDULES.get(
            alone.parallel.schedule, SCHEDULES["gpipe"]
        ).paired and "plan" not in "".join(chosen(alone))
    few, full = of(microbatches=2), of(model={"layers": 120})
    assert schedule(few) == ("interleaved", 4) and " with paired" in chosen(few)[0]
    assert (
        schedule(full) == ("interleaved", 6)
        and " with paired, which holds " in chosen(full)[0]
    )
    named = of(schedule="interleaved", virtual_stages=4)
    assert (
        schedule(named)
        == ("interleaved", 4)
        == schedule(replaced(named, train={"steps": 3}))
        and chosen(named) == []
    )
    # on CPU, for fake devices without asking the planner
    assert chosen(of({"fake_devices": 8})) == [
        "schedule: auto -> interleaved, 4 virtual stages"
    ]
    for on_fakes in (of({"fake_devices": 8}), of(cluster="cpu")):
        assert schedule(on_fakes) == ("interleaved", 4) and schedule(
            as_run_on("cpu", on_fakes)
        ) == ("interleaved", 4)
    open_one = as_run_on("cpu", of())
    assert schedule(of())[0] == "paired" and schedule(open_one) == (
        "interleaved",
        4,
    ) == schedule(plan(of(), "cpu").config)
    assert re.search("CPU devices .* paired on accelerators$", chosen(open_one)[0])
    assert schedule(replaced(open_one, mesh={"pipeline": 4})) == schedule(
        of(pipeline=4)
    )
    assert as_run_on("cpu", of(schedule="paired")).parallel.schedule == "paired"


# Forwards and backwards take turns: in each clock one stage goes forward while the other goes backward.
ALTERNATE = """# schedule=alternate stages=2 microbatches=4
stage 0,stage 1
F0,
F1,F0
,B0
B0,F1
F2,B1
B1,F2
F3,B2
B2,F3
,B3
B3,
"""


def test_a_table_of_ones_own_that_lockstep_holds_up_is_noted_with_both_costs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.csv").write_text(ALTERNATE)
    sections = {
        "mesh": {"pipeline": 2},
        "parallel": {"microbatches": 4, "schedule": "~/mine.csv"},
    }
    (note,) = notes(configuration(**sections))
    table = make_table("~/mine.csv", 2, 4)
    here, alone = (
        simulate(table, execution=execution).makespan
        for execution in ("lockstep", "asynchronous")
    )
    assert (
        f"~/mine.csv takes {here / alone:.2f} times as long here" in note
        and here > 1.25 * alone
    )
    assert f"({here:.4g} against {alone:.4g} forwards of a stage)" in note
    (tmp_path / "mine.csv").write_text(make_table("zb_h1", 2, 4).to_csv())
    assert notes(configuration(**sections)) == []


def test_no_schedule_of_our_own_is_held_up_so_much():
    """Which is why they are not looked at."""
    for name in SCHEDULES:
        for stages, microbatches in ((4, 2), (8, 8), (16, 16), (16, 24)):
            table = make_table(name, stages, microbatches, legal_chunks(name) or 4)
            here, alone = (
                simulate(table, execution=execution).makespan
                for execution in ("lockstep", "asynchronous")
            )
            assert here < WORTH_SAYING * alone, (name, stages, microbatches)

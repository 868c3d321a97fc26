import json
from dataclasses import asdict, replace

import pytest

from meshtrain.cluster.accelerators import lender
from meshtrain.cluster.cluster import DIRECTORY
from meshtrain.config import ConfigError, MeshConfig
from meshtrain.plan import ACCELERATORS, load_cluster, named

GOOD = """
nodes: 4
devices_per_node: 8
accelerator: {name: h100}
links:
  node: {devices: 8, latency: 3.0e-6, bandwidth: 450}
  rail: {devices: 32, latency: 8.0e-6, bandwidth: 50}
"""

BAD = {
    "links:\n  node: {devices: 8, bandwidth: 0}": "links.node.bandwidth is 0",
    "accelerator: {name: h10}": "did you mean h100?",
    "accelerator: {name: mine, memory: 80}": "a new one needs accelerator.bandwidth, accelerator.peak.float32",
    "accelerator: {name: h100, reserved: 90}": "leaves nothing of its memory",
    "links:\n  node: {devices: 8, bandwidth: 450}": "no link joins all 32 devices",
    "links:\n  node: {devices: 8, bandwidth: 450}\n  rail: {devices: 8, bandwidth: 50}": "levels must grow",
    "topology: ring": "must be one of fat_tree, rail_optimised, torus, dragonfly, hypercube, flat",
    "topology: torus\ndimensions: [2, 5]": "dimensions 2 x 5 are 10 places, and no level joins as many; there are 8 "
    "at links.node, 4 at links.rail.",
    "dimensions: [4, 8]": "dimensions are a torus's, and topology is fat_tree",
    "topology: torus\ndimensions: [0, 8]": "dimensions.* must be at least 1",
    "between_rails: spine": "between_rails is of rail_optimised networks, and topology is fat_tree",
    "topology: rail_optimised\nbetween_rails: spine": "a rail-optimised network needs links.spine.",
    "links:\n  rail: {devices: 32, bandwidth: 50}\ntopology: rail_optimised": "a rail-optimised network needs "
    "links.node.",
    "links:\n  node: {devices: 8, bandwidth: 450}\n  rail: {devices: 48, bandwidth: 50}\ntopology: hypercube": "links.rail joins "
    "6 "
    "blocks, and a hypercube has a power of two",
    "links:\n  node: {devices: 32, bandwidth: 450, oversubscription: 0.5}": "links.node.oversubscription is 0.5; it "
    "must be at least 1",
    "nodes: 0": "nodes is 0; it must be at least 1",
    f"nodes: {'9' * 5000}": "nodes is ",
    "shared: perhaps": "shared is 'perhaps'",
    "node: 3": "did you mean nodes?",
    "accelerator: {name: h100, memory: -3}": "must be at least 0",
    f"accelerator: {{name: {'h' * 900}}}": "hhh…hhh",
    "links:\n  node: {devices: 8, bandwith: 450}": "no key links.node.bandwith; did you mean links.node.bandwidth",
    "restart_seconds: .inf": "must be a finite number, at least 0",
    # Units mixed up: of each a figure as somebody has it at hand.
    "links:\n  node: {devices: 8, latency: 3, bandwidth: 450}": "links.node.latency is 3.0; it must be .*, in seconds "
    "(3 µs are 3e-06)",
    "links:\n  rail: {devices: 32, latency: 8, bandwidth: 50}": "links.rail.latency is 8.0; it must be .*, in seconds",
    "links:\n  rail: {devices: 32, bandwidth: 400}": "links.rail.bandwidth is 400.0; it must be .* at most 200, .*400 "
    "Gbit/s are 50",
    "links:\n  node: {devices: 8, bandwidth: 4.5e+11}": "links.node.bandwidth is 450000000000.0; it must be .* at "
    "most 5000",
    "accelerator: {name: h100, memory: 85899345920}": "accelerator.memory is 85899345920.0; it must be .*, in GiB",
    "accelerator: {name: h100, memory: 81920}": "accelerator.memory is 81920, and the data sheet of h100 says 79.6",
    "accelerator: {name: h100, bandwidth: 3.35}": "accelerator.bandwidth is 3.35, and the data sheet of h100 says 3350",
    "accelerator: {name: h100, peak: {bfloat16: 989.4e+12}}": "accelerator.peak.bfloat16 is .*, in TFLOP/s",
    "accelerator: {name: h100, peak: {bfloat16: 0.989}}": "accelerator.peak.bfloat16 is 0.989, and the data sheet of "
    "h100 says 989.4",
    "accelerator: {name: h100, efficiency: {matmul: 75}}": "accelerator.efficiency.matmul is 75.0; it must be above 0 "
    "and at most 1",
    "accelerator: {name: h100, memory: 0}": "accelerator.memory is 0; leave it out",
    "failures_per_device_hour: 50000": "failures_per_device_hour is 50000.0; it must be .*one in 50,000 hours is 2e-05",
    "restart_seconds: 300000": "restart_seconds is 300000.0; it must be at least 0 and at most 86400, in seconds",
    "storage_bandwidth: 2e+9": "storage_bandwidth is 2000000000.0; it must be .*, in GB/s of one node",
    "host_bandwidth: 20000": "host_bandwidth is 20000.0; it must be .*, in GB/s of one device",
}


def write(path, text):
    path.write_text(text)
    return path


def test_a_good_description_is_read_with_the_data_sheet_filled_in(tmp_path):
    for name in (
        "h100",
        "NVIDIA H100 80GB HBM3",
        "nvidia-h100-80gb-hbm3",
    ):  # as its driver calls it
        cluster = load_cluster(
            write(tmp_path / "mine.yaml", GOOD.replace("name: h100", f"name: {name}"))
        )
        assert (cluster.name, cluster.devices) == ("mine", 32)
        assert cluster.accelerator == ACCELERATORS["h100"]
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200"):
        load_cluster(
            write(tmp_path / "mine.yaml", GOOD.replace("name: h100", f"name: {name}"))
        )


SHEET = ACCELERATORS["h100"]
GIVEN = {
    "": SHEET,
    f"efficiency: {{matmul: {SHEET.efficiency.matmul}}}": SHEET,
    "efficiency: {matmul: 0.75}": replace(
        SHEET, efficiency=replace(SHEET.efficiency, matmul=0.75)
    ),
    "efficiency: {half_size: 0}": replace(
        SHEET, efficiency=replace(SHEET.efficiency, half_size=0.0)
    ),
    "efficiency:": SHEET,
    "reserved: 0": replace(SHEET, reserved=0.0),
    "watts: 0": replace(SHEET, watts=0.0),
    "peak: {bfloat16: 800}": replace(SHEET, peak=replace(SHEET.peak, bfloat16=800.0)),
    "peak: {bfloat16: 0}": replace(SHEET, peak=replace(SHEET.peak, bfloat16=0.0)),
}


@pytest.mark.parametrize("text", GIVEN, ids=lambda text: text or "nothing")
def test_what_is_given_of_a_known_accelerator_is_taken_and_the_rest_is_the_data_sheets(
    tmp_path, text
):
    """The class's own defaults and zeros are given, too, where they stand in the file."""
    path = write(
        tmp_path / "mine.yaml",
        GOOD.replace("{name: h100}", f"\n  name: h100\n  {text}"),
    )
    assert load_cluster(path).accelerator == GIVEN[text]


@pytest.mark.parametrize("change", BAD, ids=list(BAD.values()))
def test_a_bad_description_is_one_sentence_with_what_is_legal(tmp_path, change):
    key = change.split(":")[0]
    kept, skip = [], False
    for line in GOOD.strip().splitlines():
        if not line.startswith(" "):
            skip = line.startswith(f"{key}:")
        if not skip:
            kept.append(line)
    path = write(tmp_path / "bad.yaml", "\n".join([*kept, change]) + "\n")
    with pytest.raises(
        ConfigError, match=BAD[change].replace("(", r"\(").replace(")", r"\)")
    ) as caught:
        load_cluster(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_an_empty_description_is_told_what_it_needs_and_that_is_enough(tmp_path):
    for text in ("", "# nothing yet"):
        path = write(tmp_path / "empty.yaml", text)
        with pytest.raises(
            ConfigError, match=r"empty\.yaml is empty; .* at least "
        ) as caught:
            load_cluster(path)
        needed = str(caught.value).split("'")[1::2]
        assert load_cluster(write(path, "\n".join(needed))).devices == 8
    with pytest.raises(
        ConfigError, match=r"cluster description .* mapping .* not a list"
    ):
        load_cluster(write(path, "[1]"))


@pytest.mark.parametrize("name", ["h" * 5000, "h\0", "h\ud800", ".."])
def test_a_name_that_no_file_can_have_is_an_unknown_cluster(name):
    with pytest.raises(ConfigError, match="no such file or accelerator") as caught:
        named(name, 8)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_is_legal_and_is_as_large_as_the_mesh_asks(path):
    assert load_cluster(path).accelerator.usable_bytes > 0
    for devices in (1, 8, 64, 4096):
        cluster = named(path.stem, devices)
        assert cluster.devices >= devices
        assert cluster.group(devices, 1).size == devices


def test_every_accelerator_has_a_shipped_cluster():
    shipped = {
        path.stem: load_cluster(path).accelerator for path in DIRECTORY.glob("*.yaml")
    }
    assert {
        name: one for name, one in shipped.items() if name == one.name
    } == ACCELERATORS
    # an H800 is an H100 with slower links
    assert (
        shipped["h800"] == ACCELERATORS["h100"]
        and len(shipped) == len(ACCELERATORS) + 1
    )


def test_fake_devices_share_the_machine():
    one, eight = named("cpu", 1).accelerator, named("cpu", 8).accelerator
    assert eight.memory == one.memory / 8
    assert eight.flops("float32") == one.flops("float32") / 8


def test_a_group_crosses_the_levels_between_its_members(tmp_path):
    cluster = load_cluster(write(tmp_path / "mine.yaml", GOOD))
    mesh = MeshConfig(data=4, tensor=8, pipeline=1)
    assert [h.level for h in cluster.axis("tensor", mesh).hops] == ["node"]
    # data ranks stand 8 apart: each in a node of its own, alone on its rail
    assert [(h.level, h.fan, h.members) for h in cluster.axis("data", mesh).hops] == [
        ("rail", 4, 1)
    ]
    # two in each node: they share the way out
    wide = MeshConfig(data=8, tensor=4, pipeline=1)
    assert [(h.level, h.fan, h.members) for h in cluster.axis("data", wide).hops] == [
        ("node", 2, 1),
        ("rail", 4, 2),
    ]


def test_axes_joined_by_a_sum_need_not_be_neighbours(tmp_path):
    """Tensor ranks in a node, and stages four nodes further: the sum of both crosses the rail."""
    cluster = load_cluster(write(tmp_path / "mine.yaml", GOOD))
    both = cluster.axis("tensor+pipeline", MeshConfig(data=4, tensor=4, pipeline=2))
    assert both.size == 8 and [(h.level, h.fan, h.members) for h in both.hops] == [
        ("node", 4, 1),
        ("rail", 2, 4),
    ]


def test_efficiencies_that_are_borrowed_are_said_to_be_until_all_are_given(tmp_path):
    assert [name for name in ACCELERATORS if lender(ACCELERATORS[name])] == [
        "b200",
        "v100",
    ]
    mine = {
        key: value * 0.99
        for key, value in asdict(ACCELERATORS["b200"].efficiency).items()
    }
    some = dict(list(mine.items())[:-1])
    for given, said in ((mine, None), (some, "GB200"), ({}, "GB200")):
        text = GOOD.replace(
            "{name: h100}", f"{{name: b200, efficiency: {json.dumps(given)}}}"
        )
        assert (
            lender(load_cluster(write(tmp_path / "mine.yaml", text)).accelerator)
            == said
        )
    figures = "name: mine, memory: 80, bandwidth: 3000, peak: {float32: 400}"
    stranger = load_cluster(
        write(tmp_path / "mine.yaml", GOOD.replace("name: h100", figures))
    ).accelerator
    assert lender(stranger) == "no device in particular"

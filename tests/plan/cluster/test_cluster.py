import pytest

from meshtrain.config import ConfigError, MeshConfig
from meshtrain.plan import ACCELERATORS, load_cluster, named
from meshtrain.plan.cluster.cluster import DIRECTORY

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
    "topology: ring": "must be one of fat_tree, torus, dragonfly, flat",
    "nodes: 0": "nodes is 0; it must be at least 1",
    "node: 3": "did you mean nodes?",
    "accelerator: {name: h100, memory: -3}": "must be at least 0",
    f"accelerator: {{name: {'h' * 900}}}": "hhh…hhh",
    "links:\n  node: {devices: 8, bandwith: 450}": "there is no key links.node.bandwith; did you mean bandwidth",
    "restart_seconds: .inf": "must be a finite number, at least 0",
}


def write(path, text):
    path.write_text(text)
    return path


def test_a_good_description_is_read_with_the_data_sheet_filled_in(tmp_path):
    cluster = load_cluster(write(tmp_path / "mine.yaml", GOOD))
    assert (cluster.name, cluster.devices) == ("mine", 32)
    assert cluster.accelerator.bandwidth == ACCELERATORS["h100"].bandwidth


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
    with pytest.raises(ConfigError, match=BAD[change].replace("(", r"\(")) as caught:
        load_cluster(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "# nothing yet"])
def test_an_empty_description_is_told_what_it_needs_and_that_is_enough(tmp_path, text):
    path = write(tmp_path / "empty.yaml", text)
    with pytest.raises(ConfigError, match=r"empty.yaml is empty; it needs at least ") as caught:
        load_cluster(path)
    needed = str(caught.value).split("'")[1::2]
    assert load_cluster(write(path, "\n".join(needed))).devices == 8


def test_a_description_that_is_no_mapping_is_called_by_its_name(tmp_path):
    with pytest.raises(ConfigError, match="a cluster description must be a mapping of keys to values, not a list"):
        load_cluster(write(tmp_path / "list.yaml", "[1]"))


@pytest.mark.parametrize("name", ["h" * 5000, "h\0", "h\ud800", ".."])
def test_a_name_that_no_file_can_have_is_an_unknown_cluster(name):
    with pytest.raises(ConfigError, match="there is no such file or accelerator") as caught:
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
    assert {path.stem: load_cluster(path).accelerator for path in DIRECTORY.glob("*.yaml")} == ACCELERATORS


def test_fake_devices_share_the_machine():
    one, eight = named("cpu", 1).accelerator, named("cpu", 8).accelerator
    assert eight.memory == one.memory / 8
    assert eight.flops("float32") == one.flops("float32") / 8


def test_a_group_crosses_the_levels_between_its_members(tmp_path):
    cluster = load_cluster(write(tmp_path / "mine.yaml", GOOD))
    mesh = MeshConfig(data=4, tensor=8, pipeline=1)
    assert [h.level for h in cluster.axis("tensor", mesh).hops] == ["node"]
    # data ranks stand 8 apart: each in a node of its own, alone on its rail
    assert [(h.level, h.fan, h.members) for h in cluster.axis("data", mesh).hops] == [("rail", 4, 1)]
    # two in each node: they share the way out
    wide = MeshConfig(data=8, tensor=4, pipeline=1)
    assert [(h.level, h.fan, h.members) for h in cluster.axis("data", wide).hops] == [("node", 2, 1), ("rail", 4, 2)]


def test_an_unknown_cluster_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean h100"):
        named("h1000", 8)

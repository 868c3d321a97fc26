from pathlib import Path

import pytest
import yaml

from meshtrain.cluster.cluster import Cluster, load_cluster
from meshtrain.plan.jobs.listed import JobSpec
from meshtrain.plan.jobs.packing import Packer
from meshtrain.plan.jobs.requests import JobRequest, JobShape, Speeds

CONFIG = {
    "run": {"directory": "runs/small"},
    "model": {
        "layers": 8,
        "d_model": 2048,
        "heads": 16,
        "kv_heads": 8,
        "d_ff": 8192,
        "vocab_size": 32000,
    },
    "mesh": {"data": 4, "tensor": 2},
    "precision": {"compute": "bfloat16"},
    "train": {"global_batch_size": 32, "sequence_length": 2048, "steps": 100},
}


GOOD = """
goal: throughput
nodes: 2
jobs:
  - {name: run, config: CONFIG, set: [run.directory=runs/run]}
  - {name: short, config: CONFIG, any_of: [2, 4], steps: 10, priority: 5}
  - {name: bare, devices: 2, hours: 1}
  - {name: large, devices: 64}
kueue: {queue: training, namespace: team, image: "meshtrain:1", volume: runs, block_label: example.com/block}
"""


@pytest.fixture
def cluster(tmp_path):
    """A function (nodes, devices in each, nodes of a block, GB/s between blocks) -> an h100 cluster with a slow network
    between blocks.
    """

    def make(nodes: int, per_node: int, block: int, between: float = 5) -> Cluster:
        links = {
            "node": {"devices": per_node, "latency": 3e-6, "bandwidth": 450},
            "rail": {"devices": per_node * block, "latency": 8e-6, "bandwidth": 50},
            "spine": {
                "devices": per_node * nodes,
                "latency": 1.2e-5,
                "bandwidth": between,
            },
        }
        if block == nodes:
            del links["spine"]
        if block == 1:
            del links["rail"]
        path = tmp_path / "cluster.yaml"
        sizes = {"name": "small", "nodes": nodes, "devices_per_node": per_node}
        path.write_text(
            yaml.safe_dump(sizes | {"accelerator": {"name": "h100"}, "links": links})
        )
        return load_cluster(path)

    return make


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


@pytest.fixture
def packer():
    """A function (cluster, jobs) -> a packer of jobs of which only devices and hours are known, each on as few nodes as
    can be.
    """

    def make(cluster: Cluster, *jobs: JobSpec) -> Packer:
        def shape(devices: int) -> JobShape:
            return JobShape(
                max(1, devices // cluster.devices_per_node),
                min(devices, cluster.devices_per_node),
            )

        requests = [
            JobRequest(job, tuple(map(shape, job.any_of or (job.devices,))))
            for job in jobs
        ]
        return Packer(cluster, requests, Speeds(cluster))

    return make


@pytest.fixture
def written(tmp_path, config):
    """A function (text; default: GOOD) -> a file of jobs; CONFIG in it stands for a config."""

    def write(text: str = GOOD) -> str:
        path = tmp_path / "jobs.yaml"
        path.write_text(text.replace("CONFIG", str(config)))
        return str(path)

    return write

"""`ray`: a script that submits a job to a Ray cluster, which runs `meshtrain.launch.on_ray`."""

import argparse
import json
import shlex

from meshtrain.cli import Parser
from meshtrain.launch.job import absolute, add_engine, add_requeues, engine_job
from meshtrain.launch.on_ray import VARIABLE

SCRIPT = """\
#!/bin/bash
# One supervisor a node of the Ray cluster at RAY_ADDRESS. `ray job stop` stops the run with a checkpoint.
exec ray job submit --submission-id {name}-"$(date +%s)" \\
  --runtime-env-json {environment} \\
  -- {python} -m meshtrain.launch.on_ray
"""


def add(parser: Parser) -> None:
    add_engine(parser)
    meaning = "of a file system that all nodes share; paths of the config begin there"
    parser.add_argument("--directory", required=True, type=absolute, help=meaning)
    add_requeues(parser)


def text(options: argparse.Namespace) -> str:
    job = engine_job(options)
    request = {
        "supervisor": job.supervisor,
        "directory": options.directory,
        "nodes": job.nodes,
        "share": {"num_gpus": job.devices, "num_cpus": options.cpus_per_node or 1},
        "again": options.requeues,
    }
    # In a variable: Ray's releases differ in how they quote the words of a command.
    environment = json.dumps({"env_vars": {VARIABLE: json.dumps(request)}})
    return SCRIPT.format(name=job.name, environment=shlex.quote(environment), python=shlex.quote(options.python))

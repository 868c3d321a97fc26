"""`sky`: a task for `sky jobs launch` (SkyPilot).

SkyPilot ends all nodes when the command of one ends with an error. So a supervisor that was killed is started again
where it was, and only a code that a supervisor itself ends with ends the task. 75 brings the task back on
machines that are there (recover_on_exit_codes). Machines without an image of the user's get the directory
in which `sky` is called, a checkout of meshtrain, and install it.
"""

import argparse
import shlex

from meshtrain.cli import STOPPED, Parser
from meshtrain.errors import ConfigError
from meshtrain.launch.job import (
    Launcher,
    add_engine,
    add_mount,
    again,
    engine_job,
    manifest,
    word,
)

NODE = '--node "n$SKYPILOT_NODE_RANK" --address "$address"'
RUN = """\
cd {mount} || exit 2
address=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")
{again}exit "$code"
"""


def add(parser: Parser) -> None:
    add_engine(parser)
    parser.add_argument(
        "--accelerator",
        type=word,
        help="as SkyPilot calls it, such as H100; needed unless --gpus-per-node is 0",
    )
    parser.add_argument(
        "--image",
        help="a container image that has meshtrain (default: the checkout in which sky is called is installed)",
    )
    parser.add_argument(
        "--volume",
        required=True,
        type=word,
        help="a SkyPilot volume that all nodes share",
    )
    add_mount(parser)
    parser.add_argument(
        "--spot", action="store_true", help="take machines that may be taken away"
    )


def text(options: argparse.Namespace) -> str:
    job = engine_job(options)
    if job.devices and not options.accelerator:
        raise ConfigError(
            f"--accelerator is missing: a node has {job.devices} devices; give it, or --gpus-per-node 0."
        )
    resources = {
        "accelerators": f"{options.accelerator}:{job.devices}" if job.devices else None,
        "cpus": f"{options.cpus_per_node}+" if options.cpus_per_node else None,
        "image_id": f"docker:{options.image}" if options.image else None,
        "use_spot": options.spot or None,
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [STOPPED],
        },
    }
    setup = f"{shlex.quote(options.python)} -m pip install --quiet '.{'[cuda12]' if job.devices else ''}'\n"
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {
            key: value for key, value in resources.items() if value is not None
        },
        **({} if options.image else {"workdir": ".", "setup": setup}),
        "volumes": {options.mount: options.volume},
        "run": RUN.format(mount=shlex.quote(options.mount), again=again(job, NODE)),
    }
    return manifest(task)


LAUNCHERS = {
    "sky": Launcher(
        "print a SkyPilot task", add, text=text, hint="give it to sky jobs launch"
    )
}

"""`ray`: a script that submits a job to a Ray cluster; and what that job runs: one supervisor a node, until the run is
over.

A node that is lost takes its supervisor with it; Ray retries the task on another, and the supervisor there joins the
run that went on. A supervisor that was killed, or stopped (75), is started again, up to a total number of times. Codes
0 and 3 mean that the run is over: a task that still waits for a node waits no longer. The job's exit code is the run's.

`ray job stop` sends SIGTERM to the job, and SIGKILL 3 s later; what tasks have started Ray kills with the job. So the
job asks for more time (STOP_TIME), cancels its tasks, and each has its supervisor stop with a checkpoint before it
ends.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from meshtrain.cli import DONE, FAILED, STOPPED, Parser
from meshtrain.errors import say, short
from meshtrain.launch import GIVEN_UP, is_final, outcome
from meshtrain.launch.job import (
    GRACE,
    Launcher,
    absolute,
    add_engine,
    add_requeues,
    engine_job,
)
from meshtrain.orphans import die_with_parent

# Environment variable, JSON: supervisor, directory, nodes, share, again
VARIABLE = "MESHTRAIN_RAY"
PAUSE = 10.0  # seconds before a supervisor is started again
STOP_TIME = (
    # Environment variable of Ray's: seconds from SIGTERM to SIGKILL
    "RAY_JOB_STOP_WAIT_TIME_S"
)
# Seconds from one look at what was asked of the job, or of a task, to the next
LOOK = 0.5
LAST = 60.0  # seconds that the others have to end after the run is over
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
    environment = json.dumps(
        {"env_vars": {VARIABLE: json.dumps(request), STOP_TIME: str(GRACE)}}
    )
    return SCRIPT.format(
        name=job.name,
        environment=shlex.quote(environment),
        python=shlex.quote(options.python),
    )


LAUNCHERS = {
    "ray": Launcher(
        "print a script that submits a Ray job", add, text=text, hint="run it with bash"
    )
}

# --- the job


def supervise(words: list[str], directory: str, node: str, address: str) -> int:
    """Runs one supervisor; returns its exit code.

    It stops with a checkpoint when its task is cancelled, or the worker of Ray's is ended.
    """
    words = [*words, "--node", node, "--address", address]
    process = subprocess.Popen(
        words, cwd=directory, preexec_fn=die_with_parent(signal.SIGTERM)
    )
    while True:
        try:
            # Ray cancels a task as Ctrl-C does, and without a signal that would wake a longer wait.
            while (code := process.poll()) is None:
                time.sleep(LOOK)
            return code
        except KeyboardInterrupt:
            process.terminate()


def drive(
    start: Callable[[int], Any],
    first: Callable[[list[Any], float | None], Any],
    nodes: int,
    again: int,
    is_stopped: Callable[[], object] = bool,
) -> int:
    """Runs the supervisors of all nodes; returns the run's exit code.

    `start` starts one node's task and returns a handle on it; `first` waits for the first of some handles, at most so
    many seconds, and returns it with its exit code, or None. Up to `again` supervisors that were killed or
    stopped are started again, unless the job itself is asked to stop.
    """
    running = {start(node): node for node in range(nodes)}
    codes = dict[int, int]()
    until = float("inf")
    while running and (left := until - time.monotonic()) > 0:
        ended = first(list(running), left if until < float("inf") else None)
        if ended is None:
            break
        handle, code = ended
        node = running.pop(handle)
        if (
            (code == STOPPED or not is_final(code))
            and again
            and until == float("inf")
            and not is_stopped()
        ):
            again -= 1
            say(f"n{node} ended with exit code {code}; it is started again.")
            time.sleep(PAUSE)
            running[start(node)] = node
            continue
        codes[node] = code
        if code in (DONE, GIVEN_UP):
            until = min(until, time.monotonic() + LAST)
    return outcome(codes.values())


def main() -> int:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    request = json.loads(os.environ[VARIABLE])
    ray.init()
    share = request["share"]
    bundles = [
        {"CPU": share["num_cpus"], "GPU": share["num_gpus"]}
        for _ in range(request["nodes"])
    ]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_node(words: list[str], directory: str, node: str) -> int:
        return supervise(words, directory, node, ray.util.get_node_ip_address())

    # A task whose node or worker was lost ended with no code of ours.
    task = ray.remote(max_retries=-1, **share)(on_node)

    def start(node: int) -> Any:
        where = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=node
        )
        return task.options(scheduling_strategy=where).remote(
            request["supervisor"], request["directory"], f"n{node}"
        )

    asked: list[int] = []
    # After ray.init, which listens itself.
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    cancelled: set[Any] = set()

    def first(handles: list[Any], timeout: float | None) -> tuple[Any, int] | None:
        until = float("inf") if timeout is None else time.monotonic() + timeout
        ready: list[Any] = []
        while not ready and time.monotonic() < until:
            for handle in set(handles) - cancelled if asked else ():
                ray.cancel(handle)
                cancelled.add(handle)
            ready, _ = ray.wait(handles, num_returns=1, timeout=LOOK)
        if not ready:
            return None
        try:
            return ready[0], ray.get(ready[0])
        except ray.exceptions.TaskCancelledError:
            return ready[0], STOPPED
        except ray.exceptions.RayError as error:
            # It could not be started at all.
            say(f"a node's supervisor ended without an exit code: {short(error)}.")
            return ready[0], FAILED

    return drive(start, first, request["nodes"], request["again"], lambda: asked)


if __name__ == "__main__":
    sys.exit(main())

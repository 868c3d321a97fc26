"""What a Ray job runs: one supervisor a node of the cluster, until the run is over.

A node that is lost takes its supervisor with it; Ray retries the task on another, and the supervisor there joins the run that went on.
Of codes: a supervisor that was killed, or stopped (75), is started again, so often in all; with 0 or 3 the run is over, and a task that
still waits for a node waits no longer. The job's exit code is the run's.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from meshtrain.cli import DONE, FAILED, STOPPED
from meshtrain.errors import say, short
from meshtrain.launch.outcome import GIVEN_UP, is_final, outcome
from meshtrain.orphans import die_with_parent

VARIABLE = "MESHTRAIN_RAY"  # environment variable, JSON: supervisor, directory, nodes, share, again
PAUSE = 10.0  # seconds before a supervisor is started again
LAST = 60.0  # seconds that the others have to end after the run is over


def supervise(words: list[str], directory: str, node: str, address: str) -> int:
    """One supervisor; its exit code. It stops with a checkpoint when its parent, a worker of Ray's, is ended."""
    words = [*words, "--node", node, "--address", address]
    return subprocess.Popen(words, cwd=directory, preexec_fn=die_with_parent(signal.SIGTERM)).wait()


def drive(start: Callable[[int], Any], first: Callable[[list[Any], float | None], Any], nodes: int, again: int) -> int:
    """Has all nodes supervised. `start` gives a handle on one node's task; `first` waits for the first of some handles, at most so many
    seconds, and gives it with its exit code, or None."""
    running, codes, until = {start(node): node for node in range(nodes)}, dict[int, int](), float("inf")
    while running and (left := until - time.monotonic()) > 0:
        ended = first(list(running), left if until < float("inf") else None)
        if ended is None:
            break
        handle, code = ended
        node = running.pop(handle)
        if (code == STOPPED or not is_final(code)) and again and until == float("inf"):
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
    bundles = [{"CPU": share["num_cpus"], "GPU": share["num_gpus"]} for _ in range(request["nodes"])]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_node(words: list[str], directory: str, node: str) -> int:
        return supervise(words, directory, node, ray.util.get_node_ip_address())

    # A task whose node or worker was lost ended with no code of ours.
    task = ray.remote(max_retries=-1, **share)(on_node)

    def start(node: int) -> Any:
        where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
        return task.options(scheduling_strategy=where).remote(request["supervisor"], request["directory"], f"n{node}")

    def first(handles: list[Any], timeout: float | None) -> tuple[Any, int] | None:
        ready, _ = ray.wait(handles, num_returns=1, timeout=timeout)
        if not ready:
            return None
        try:
            return ready[0], ray.get(ready[0])
        except ray.exceptions.RayError as error:
            # It could not be started at all.
            say(f"a node's supervisor ended without an exit code: {short(error)}.")
            return ready[0], FAILED

    return drive(start, first, request["nodes"], request["again"])


if __name__ == "__main__":
    sys.exit(main())

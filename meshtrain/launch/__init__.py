"""Starts a run on several nodes: one supervisor a node, `python -m meshtrain.survive`, and its exit code handed to who
can start it again.

    local N, ssh                        run the supervisors, and end when they have
    slurm, jobset, trainjob, ray, sky   print what that engine takes, and run nothing

- `meshtrain.launch.job`: what every launcher needs: nodes, devices a node, the supervisor's command.
- `meshtrain.launch.flags`: flags of XLA and variables of NCCL for a config on a cluster.
- `meshtrain.launch.local_nodes`, `ssh`: supervisors as children of this process: their output, signals, no orphan.
- `meshtrain.launch.slurm`, `kubernetes` (jobset, trainjob), `on_ray`, `sky`: one text each. `on_ray` is what a Ray job
  runs, too.

Engines allocate, queue and replace nodes; what a fault is and what to do about it the supervisors decide among
themselves. Nothing here loads JAX.
"""

from collections.abc import Iterable

from meshtrain.cli import DONE, FAILED, STOPPED, USAGE

GIVEN_UP = 3
# The first of these that any supervisor ended with is what the run came to. A supervisor ends with 0 or 3 only when the
# whole run has: another that was killed, or whose node was lost, says nothing against it. What never works (2) stands
# before what goes on (75), or a run with a node that is set up wrongly would be started again for ever.
ORDER = (DONE, GIVEN_UP, USAGE, STOPPED)


def outcome(codes: Iterable[int]) -> int:
    """Returns one exit code for those of all supervisors; whatever else they are (a signal's, say) is a failure."""
    ended = set(codes)
    return next((code for code in ORDER if code in ended), FAILED)


def is_final(code: int) -> bool:
    """Returns whether a supervisor ended by itself, and not by a signal (negative, or 128 and more as shells have
    it).
    """
    return 0 <= code < 128

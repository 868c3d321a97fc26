"""A run outlives its faults: one supervisor a node over the run directory, no server, one training process under each.

    node n0                            RUN/survive/                          node n1
    supervisor ──── record, events ──► nodes/ plans/ events ◄─────────────── supervisor (n0 leads: the lowest live name)
      │  ▲   ◄──────── the newest plan ────┘      └──────────────────────────► │  ▲
      ▼  │ heartbeat: step, phase, seconds                                     ▼  │
    rank 0 ◄─────────────────────── collectives ────────────────────────────► rank 1

    a fault ─► verdict ─► every process of generation K is ended ─► a mesh for the nodes that are left
                                               generation K + 1, from the newest intact checkpoint ◄─┘

- `supervisor`: the loop of one node; `child`: its training process; `console`: its output; `leader`: what the one that
  leads does besides.
- `records`, `store`: what supervisors write for one another, and where; `view`: what one knows of the others; `agreed`:
  the run's exit code.
- `decide`: what follows, as one pure function; `detectors`: all kinds of faults, and who is to blame; `forming`: the
  mesh for what is left.
- `stragglers`, `health`: slow ranks, and devices that compute wrongly. `heartbeat`, `supervised`, `supervision`: a
  training process's side. `injector`: faults on purpose (`meshtrain.config.inject`).
- `history`: what the nodes have written; `ledger`, `reliability`: the facts that follow; `stats`, `picture`: as text
  and as a page.

Allocation, queues and new nodes are the scheduler's: `meshtrain.launch` writes what starts a supervisor a node there.

Exit codes: 0 done; 1 failed; 2 wrong usage or config; 3 given up, do not start it again; 75 stopped on request or for
want of nodes, run again to go on.

Tried: `python -m experiments.survive kinds` injects 32 kinds of faults on 2 and 4 processes.
"""

import os
import sys
from functools import cache

from meshtrain.errors import ConfigError, say
from meshtrain.survive.heartbeat import CODES, VARIABLE, Heartbeat


@cache
def begun() -> Heartbeat | None:
    """The heartbeat of this process, begun at the first call; None if no supervisor started it.

    Children of the process have none.
    """
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    from meshtrain.survive.supervised import SupervisedHeartbeat, read_settings

    return SupervisedHeartbeat(read_settings(text))


def begin() -> None:
    """Begins the heartbeat of a process that only starts: what is wrong ends it with a sentence."""
    try:
        begun()
    except ConfigError as error:
        say(error)
        sys.exit(CODES["config"])

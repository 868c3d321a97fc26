"""A run outlives its faults: one supervisor a node over the run directory, no server, one training process under each.

    node n0                            RUN/survive/                          node n1
    supervisor ──── record, events ──► nodes/ plans/ events ◄─────────────── supervisor (n0 leads: the lowest live name)
      │  ▲   ◄──────── the newest plan ────┘      └──────────────────────────► │  ▲
      ▼  │ beat: step, phase, seconds                                          ▼  │
    rank 0 ◄─────────────────────── collectives ────────────────────────────► rank 1

    a fault ─► verdict ─► every process of generation K is ended ─► a mesh for the nodes that are left ─► generation K + 1, from the
                                                                    newest intact checkpoint

- `supervisor`: the loop of one node; `child`: its training process; `view`, `store`, `records`: what it knows of the others.
- `decide`: what follows, as one pure function; `causes`, `hangs`, `stragglers`: who is to blame. `forming`: the mesh for what is left.
- `beat`, `health`: what a training process says of itself, and of its devices. `inject`, `injector`, `node_injector`: faults on purpose.
- `history`, `ledger`, `reliability`, `life`, `picture`, `stats`, `status`: what became of a run and of its time.

Allocation, queues and new nodes are the scheduler's: `meshtrain.launch` writes what starts a supervisor a node there.

Exit codes: 0 done; 1 failed; 2 wrong usage or config; 3 given up, do not start it again; 75 stopped on request or for want of nodes, run
again to go on.

Tried: `python -m experiments.survive kinds` injects 32 kinds of faults on 2 and 4 processes.
"""

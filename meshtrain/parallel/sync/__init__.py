"""Islands that take steps by themselves and are brought together now and then: local SGD, DiLoCo, Streaming DiLoCo.

    every 4, start 2        step   1   2 | 3   4   5   6 | 7   8   9  10 | ...
    island 0                       ═   ═   ─   ─   ─   ─ ┐ ─   ─   ─   ─ ┐
    island 1                       ═   ═   ─   ─   ─   ─ ┤ ─   ─   ─   ─ ┤
    shared model                   ═   ═                 ┴               ┴        outer step: SGD with Nesterov momentum

    ═  gradients summed over all islands      ─  each island for itself: nothing is sent across

- `when`: which step is of which kind, which layers are a fragment, how many bytes it has (no JAX).
- `outer`: the exchange across islands and the outer step, on one device.
- `states`: what a `State` holds besides, and how it lies.

The compiled programs of a run are put together in `meshtrain.parallel.sync.steps`. Sources: Stich 2019 (local SGD),
Douillard et al. 2023 (DiLoCo, algorithm 1), Douillard et al. 2025 (Streaming DiLoCo, algorithm 2).
"""

"""On which devices a run was, from what its rows and samples say: what its plan is for where nobody names a cluster."""

from collections.abc import Mapping

import numpy as np

from meshtrain.config import Config
from meshtrain.plan.cluster.accelerators import ACCELERATORS
from meshtrain.plan.peak import KINDS
from meshtrain.plan.shapes import model_flops
from meshtrain.report.rows import Columns

NEAR = 0.01  # by which a peak may be another
LEAST = 1e-9  # MFU that tells anything


def likely(config: Config, steps: Columns, samples: Mapping[int, Columns]) -> str | None:
    """The accelerator whose peak the rows' MFU is a share of, of equal ones that with the memory of the devices; the cpu where
    no row and no sample knows of a device; None if it cannot be told.
    """
    rate, mfu = steps["tokens_per_second"], steps["mfu"]
    good = (rate > 0) & (mfu > LEAST)
    limits = [
        columns.known(name) for columns in samples.values() for name in columns.names("device_memory_limit_bytes")
    ]
    if good.any():
        of_a_token = model_flops(config) / (config.train.global_batch_size * config.train.sequence_length)
        peak = float(np.median(rate[good] / mfu[good])) * of_a_token / config.mesh.devices
        known = [ACCELERATORS[name] for name in dict.fromkeys(KINDS.values())]
        found = [a for a in known if abs(a.flops(config.precision.compute) / peak - 1) < NEAR]
        if limit := max((float(values.max()) for values in limits if values.size), default=None):
            found.sort(key=lambda a: abs(a.memory_bytes - limit))
        return found[0].name if found else None
    devices = limits or "memory_in_use_bytes" in steps or any(columns.names("device_") for columns in samples.values())
    if devices:
        return None
    # The same config runs on accelerators where there are some: what rows and samples know of comes first.
    return "cpu" if samples or config.run.fake_devices else None

"""Idle time and makespan of the named schedules by formula, where a formula is exact: for searches over thousands of plans.

p stages, m microbatches, v chunks a stage; F, I, W what a whole stage needs for one microbatch, B = I + W; c one message.
With chunks, r = p - 1 + (v-1) max(0, p-m): fewer microbatches than stages leave the ring partly empty on every round.

    schedule                     asynchronous                             lockstep, c = 0
    gpipe                        (p-1)(F+B+2c)                            (p-1)(F+B)
    1f1b                         (p-1)(F+B+2c)       if c <= (F+B)/2      (p-1)(F+B)
    zb_h1                        (p-1)(F+I+2c) - nW  if c <= (F+I)/2,     (p-1)(F+I)
                                                     W <= F and W <= I
    interleaved, looped_bfs      r (F+B)/v           if c = 0             r (F+B)/v
    zb_interleaved               ((p-1)(F+I) - nW)/v if c = 0, m >= p,    r (F+I)/v
                                                     W <= F and W <= I
    v_1f1b                       (p-1) max(F, B)     if c = 0, m >= p     (p-1)(F+B)

n = min(m, p) - 1, so that with m >= p the two zero-bubble schedules have the (p-1)(F+I-W) of Qi et al. 2023. A W longer
than an I stands in the way of the chain of I at the end, and one longer than an F can hold up the chain of F: then the
idle time is longer. All stages are taken to be equally long, and the asynchronous formulas have no loss head.
"""

import numpy as np

from meshtrain.schedule.simulate import CLOCKS, Durations

_ZERO_BUBBLE = ("zb_h1", "zb_interleaved")
_KNOWN = ("gpipe", "1f1b", "zb_h1", "interleaved", "looped_bfs", "zb_interleaved", "v_1f1b")


class NotExact(ValueError):
    """There is no exact formula for this case, which must be simulated. The message says why."""


def bubble(
    schedule: str, stages: int, microbatches: int, chunks: int, durations: Durations, clock: str = "lockstep"
) -> float:
    """Time in which a stage does none of F, B and W, the same for every stage, as `simulate` finds it.

    The loss head, which only lockstep has a formula for, is left out: see `makespan`. Raises NotExact where no formula
    is exact.
    """
    if clock not in CLOCKS:
        raise ValueError(f"clock '{clock}' is not one of {', '.join(CLOCKS)}")
    if schedule not in _KNOWN:
        raise NotExact(f"there is no formula for schedule '{schedule}', only for {', '.join(_KNOWN)}")
    p, m, v, c = stages, microbatches, chunks, durations.message
    forward, input_grad, weight_grad = _whole_stage(durations, chunks)
    split = schedule in _ZERO_BUBBLE
    chain = forward + input_grad + (0.0 if split else weight_grad)  # what stages wait for, one after the other
    if schedule == "v_1f1b":
        rounds = 2 * (p - 1)
    else:
        rounds = p - 1 + (v - 1) * max(0, p - m)  # in which a stage is idle, each as long as one chunk

    if clock == "lockstep":
        if c and p > 1:
            raise NotExact("in lockstep the formulas are for messages that take no time")
        return rounds * chain / v

    if durations.head:
        raise NotExact("stages that run on their own wait for the loss head in ways that no formula here describes")
    if split and weight_grad > min(forward, input_grad):
        raise NotExact(
            "the zero-bubble formulas are for a weight gradient no longer than a forward or an input gradient"
        )
    if v > 1 and m < p and schedule in ("zb_interleaved", "v_1f1b"):
        raise NotExact(f"schedule {schedule} has a formula only for at least as many microbatches as stages")
    if c and v > 1:
        raise NotExact("with several chunks the formulas are for messages that take no time")
    if c > chain / 2 and schedule not in ("gpipe", "looped_bfs"):
        raise NotExact(
            f"schedule {schedule} has a formula only for messages up to half of F+B (of F+I where it is split)"
        )
    if schedule == "v_1f1b":
        return (p - 1) * max(forward, input_grad + weight_grad)
    late = (min(p, m) - 1) * weight_grad if split else 0.0
    return (rounds * chain - late) / v + 2 * (p - 1) * c


def makespan(
    schedule: str, stages: int, microbatches: int, chunks: int, durations: Durations, clock: str = "lockstep"
) -> float:
    """Time from the first forward to the end of the optimizer. Raises NotExact like `bubble`."""
    idle = bubble(schedule, stages, microbatches, chunks, durations, clock)
    head = durations.head / (stages if durations.head_spread else 1)
    return microbatches * (sum(_whole_stage(durations, chunks)) + head) + idle + durations.optimizer


def _whole_stage(durations: Durations, chunks: int) -> tuple[float, float, float]:
    parts = (durations.forward, durations.input_grad, durations.weight_grad)
    if any(np.ndim(part) for part in parts):
        raise NotExact("the formulas are for stages of equal length, and durations are given for each virtual stage")
    forward, input_grad, weight_grad = (float(part) * chunks for part in parts)
    return forward, input_grad, weight_grad

"""Whether requests should be sent here: what /health says to a balancer and to Kubernetes' probes.

    loading ──► ready ◄──► stuck     there are requests, and no step has ended for too long
                  ├──────► broken    the device's programs fail, again and again
                  └──────► draining  the server was asked to end; what runs is finished, and others should be asked

In all but ready the answer is 503.
"""

from typing import Any, NamedTuple, Protocol

READY = "ready"
COMPILING = 1800.0  # seconds that a program may take that runs for the first time, if a step may take no more


class Verdict(NamedTuple):
    """`state`: ready, loading, stuck, broken or draining; `why`: a sentence."""

    state: str
    why: str

    @property
    def status(self) -> int:
        return 200 if self.state == READY else 503


class Status(Protocol):
    """What of an engine's status is looked at; times are of time.monotonic."""

    @property
    def busy(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def last_step(self) -> float: ...

    @property
    def turn_began(self) -> float | None: ...

    @property
    def compiling(self) -> bool: ...

    @property
    def broken(self) -> str: ...


def verdict(status: Status | None, begun: float, draining: bool, stuck_after: float, now: float) -> Verdict:
    """`status`: None while the model is loaded; `begun`: since when there have been requests; `now`: by time.monotonic."""
    if draining:
        return Verdict("draining", "the server ends when what runs is done; send requests to another.")
    if status is None:
        return Verdict("loading", "the model is being loaded.")
    if status.broken:
        return Verdict("broken", status.broken)
    # An engine that had nothing to do took no step either.
    still = now - max(status.turn_began or status.last_step, begun)
    patience = max(stuck_after, COMPILING) if status.compiling else stuck_after
    if status.busy + status.waiting and still > patience:
        return Verdict("stuck", f"{status.busy} requests are in slots, and no step has ended for {still:.0f} s.")
    return Verdict(READY, "requests are answered.")


def body(found: Verdict, model: str, status: Any) -> dict[str, Any]:
    """What /health says besides its HTTP status."""
    told = {"status": found.state, "model": model, "message": found.why}
    return told if status is None else told | {"slots": status.slots, "busy": status.busy, "waiting": status.waiting}

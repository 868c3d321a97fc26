"""Does to a node what it was asked to inject: kinds whose place is the supervisor, see `survive.inject`.

`node-returns` is played: the process is killed, the node falls silent for twice survive.node_timeout, and then is there as a new one.
"""

import os
import signal
import socket
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from meshtrain.errors import ConfigError
from meshtrain.survive.inject import Request, claimed, parse, requests
from meshtrain.survive.words import finish, say

if TYPE_CHECKING:
    from meshtrain.survive.supervisor import Supervisor

LOOK_EVERY = 1.0  # seconds


class NodeInjector:
    """Of one supervisor."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self.supervisor = supervisor
        self.requests = {r.name: r for r in requests(supervisor.config.survive.inject)}
        self._looked = -LOOK_EVERY
        self.silent_until: float | None = None
        self._taken: socket.socket | None = None  # the port that somebody else has

    def look(self, now: float) -> None:
        """Does what is due; may not come back."""
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._read()
        node = self.supervisor.node
        if node.rank is None or node.end is not None:
            return
        due = [r for r in self.requests.values() if r.kind.where == "supervisor" and node.rank.step >= r.step]
        for request in due:
            if request.kind.name != "port-taken" and self._is_here(request, node.rank.number) and self._claims(request):
                self._do(request, now)

    def is_silent(self, now: float) -> bool:
        """Whether the node is to be taken for gone; at the end of that it is a new one."""
        if self.silent_until is not None and now >= self.silent_until:
            self.silent_until = None
            supervisor = self.supervisor
            supervisor.node = replace(
                supervisor.node, incarnation=uuid.uuid4().hex, state="idle", generation=0, acked=0, rank=None, end=None
            )
            supervisor.store.say(
                "join", incarnation=supervisor.node.incarnation, host=supervisor.node.host, pid=os.getpid()
            )
        return self.silent_until is not None

    def port(self, free: int) -> int:
        """The port that this node tells the others: one that is taken, where that is asked for."""
        plan = self.supervisor.view.plan
        for request in list(self.requests.values()):
            due = request.kind.name == "port-taken" and (plan is None or (plan.step or 0) >= request.step)
            if due and self.supervisor.view.is_first(self.supervisor.node) and self._claims(request):
                self._taken = socket.create_server((self.supervisor.node.address, free))
        return free

    def _is_here(self, request: Request, rank: int) -> bool:
        if request.kind.name == "leader-lost":
            return self.supervisor.leader.leads
        return rank == (0 if request.kind.name == "coordinator-lost" else request.rank)

    def _claims(self, request: Request) -> bool:
        del self.requests[request.name]
        return claimed(self.supervisor.store.root / "injected", request)

    def _do(self, request: Request, now: float) -> None:
        supervisor, name = self.supervisor, request.kind.name
        say(f"{request.name}: {request.kind.does}, injected into {supervisor.node.name}.")
        finish()
        child = supervisor.child
        if name in ("node-lost", "leader-lost", "coordinator-lost", "node-returns") and child is not None:
            os.killpg(child.process.pid, signal.SIGKILL)
        if name == "node-returns":
            supervisor.discard()
            self.silent_until = now + 2 * supervisor.options.node_timeout
        elif name == "supervisor-frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "store-lost":
            supervisor.store.lose()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def _read(self) -> None:
        """Requests of `survive inject`; what is no request is named by the processes that do most of them."""
        for text in self.supervisor.store.asked():
            try:
                found = parse(text)
            except ConfigError:
                continue
            for request in found:
                if not (self.supervisor.store.root / "injected" / request.name).exists():
                    self.requests.setdefault(request.name, request)

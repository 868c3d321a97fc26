"""One node's supervisor: a loop that watches its training process, publishes its record, reads the others', leads if it
is its turn, follows.

    every 0.2 s   own process ─► own record ─► others' records ─► lead: decide, propose a plan ─► follow the newest plan

The live node of the lowest name leads; a plan is a file whose number one leader alone can take, so that two leaders do
no harm. A new generation is formed once no live node has a process of the one before.
"""

import contextlib
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from meshtrain.config import Config
from meshtrain.errors import ConfigError, refusal
from meshtrain.model.weights import parameters
from meshtrain.registry import TRUST
from meshtrain.run.early import heard
from meshtrain.survive import console
from meshtrain.survive.agreed import done_already
from meshtrain.survive.child import TrainingProcess, kill_left_behind, train_command
from meshtrain.survive.console import report
from meshtrain.survive.detectors import timeout
from meshtrain.survive.injector import NodeInjector
from meshtrain.survive.leader import Leader, sizes
from meshtrain.survive.records import Node, ProcessEnd, RestartPlan, SupervisorOptions
from meshtrain.survive.store import Store, config_of
from meshtrain.survive.view import View, config_text, digests, this_machine

POLL = 0.2
# A node that cannot reach the store ends its process after this share of survive.node_timeout: before the others take
# it for lost.
CUT_OFF = 0.6
GIVEN_UP = 300.0  # seconds without a store after which a supervisor ends
# Bytes a parameter, of float32 weights and up to three arrays of an optimizer
STATE = 16
SLOW_DISK = 50e6  # bytes a second, of one node
# Seconds after SIGKILL: the process is in the kernel, and its node of no use
UNENDED = 30.0
NEWS = (
    "state",
    "generation",
    "acked",
    "leaving",
    "end",
)  # of a node's record, published at once where they changed


class Supervisor:
    """The supervisor of the node `name` of a run, which the others reach at `address`.

    `command` makes the command of a training process from its config.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        address: str,
        command: Callable[[Path], list[str]] = train_command,
    ) -> None:
        self.config = config
        self.command = command
        self.run_directory = Path(config.run.directory).absolute()
        with contextlib.suppress(FileExistsError):
            self.run_directory.mkdir(mode=0o755, parents=True)
        self.store = Store(self.run_directory, name)
        survive = config.survive
        self.options = SupervisorOptions(
            sizes(config),
            survive.wanted,
            survive.least,
            survive.join_timeout,
            survive.step_timeout,
            survive.node_timeout,
            survive.restarts,
            STATE * parameters(config.model) / survive.least / SLOW_DISK,
        )
        self.node = Node(
            name,
            uuid.uuid4().hex,
            socket.gethostname(),
            machine=this_machine(),
            pid=os.getpid(),
            address=address,
            digests=digests(config),
        )
        self.view = View(self.store, self.options)
        self.leader = Leader(
            config, self.run_directory, self.store, self.view, self.options
        )
        self.injector = NodeInjector(self)
        self.child: TrainingProcess | None = None
        self.killed_at: float | None = None
        self.stopping = 0  # requests to stop that have come
        self.asked_to_stop = -1  # the generation whose process it has asked to stop
        self.published: Node | None = None
        self.published_at = self.reached = self.began = time.monotonic()
        self.saved: int | None = None
        self.going = False

    # --- the loop

    def run(self) -> int:
        """Runs until the run is over, or this node is asked to go; returns the exit code."""
        for number in heard():
            signal.signal(number, self._asked)
        console.begin()
        self.view.refuse_twin(self.node.name)
        if done := done_already(self.store.plans(), self.config, self.run_directory):
            report(f"{done}: the run is done already.")
            console.finish()
            return 0
        self.store.publish_config(config_text(self.config))
        try:
            self._publish(time.monotonic())
        except OSError as error:
            raise ConfigError(
                f"this node's record in {self.store.root} cannot be written: {refusal(error)}."
            ) from None
        self.store.log(
            "join",
            incarnation=self.node.incarnation,
            host=self.node.host,
            pid=os.getpid(),
        )
        try:
            while (code := self._round()) is None:
                time.sleep(POLL)
            return code
        finally:
            if self._end():
                # The next one under this name need not wait for the process.
                with contextlib.suppress(OSError, ConfigError):
                    self.store.publish(
                        replace(
                            self.node, state="idle", sequence=self.node.sequence + 1
                        )
                    )
            console.finish()

    def _round(self) -> int | None:
        now = time.monotonic()
        if self.injector.is_silent(now):
            return None
        self._watch()
        try:
            self.injector.look(now)
            self._publish(now)
            self.view.look(now, self.node)
            self._fence()
            self.view.refuse_stranger(self.node)
            self.leader.lead(self.node, now - self.began)
            code = self._follow()
            self.reached = now
            if self.child is not None:
                # Not before: of a node that was frozen the others may have gone on without it.
                self.child.renew()
            return code
        except OSError as error:
            return self._cut_off(now - self.reached, error)

    def _asked(self, number: int, _: object) -> None:
        self.stopping += 1

    # --- its own process

    def _watch(self) -> None:
        child = self.child
        if child is None:
            return
        if child.number == 0:
            console.echo(child.new_output())
        if self.node.end is not None:
            return
        end = child.ended()
        rank = child.look() if end is None else child.rank
        self.node = replace(self.node, rank=rank)
        if end is not None:
            self._log_end(child, end)
        elif rank.phase_age > max(0.5, 0.8 * timeout(rank, self.options)):
            child.ask_stacks()
        self._log_progress(child)
        if self.stopping and end is None and self.asked_to_stop < child.generation:
            self.asked_to_stop = child.generation
            child.stop()
            ends = "ends after a step with a checkpoint, or before its first without"
            report(f"asked to stop: the process, in the phase {rank.phase}, {ends}.")
        if self.stopping > 1 and end is None:
            child.kill()

    def _log_end(self, child: TrainingProcess, end: ProcessEnd) -> None:
        self.node = replace(self.node, state="ended", end=end)
        # So that nothing which it has started goes on.
        child.kill()
        while child.number == 0 and (text := child.new_output(to_the_end=True)):
            console.echo(text)
        self.store.log(
            "ended",
            generation=child.generation,
            rank=child.number,
            exit=end.exit,
            kind=end.kind,
            sentence=end.sentence,
            step=end.step,
            start=child.rank.start,
            phase=child.rank.phase,
            phase_seconds=child.rank.phase_age,
            seconds=dict(child.heartbeat.get("seconds") or {}),
        )

    def _log_progress(self, child: TrainingProcess) -> None:
        rank = child.rank
        at = {"generation": child.generation, "rank": child.number}
        if not self.going and rank.start is not None and rank.step > rank.start:
            self.going = True
            self.store.log(
                "going", **at, start=rank.start, cache=child.heartbeat.get("cache")
            )
        save = child.heartbeat.get("at_save")
        if (
            child.number == 0
            and isinstance(save, dict)
            and save.get("step") != self.saved
        ):
            self.saved = save.get("step")
            self.store.log("save", **at, step=self.saved, seconds=save.get("seconds"))

    def _start(self, plan: RestartPlan) -> None:
        number = plan.members.index(self.node.name)
        files = self.store.generation(plan.generation)
        others = ("SLURM_", "JAX_COORDINATOR", "JAX_PROCESS", "JAX_NUM_P")
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(self.store.root / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment |= {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(others)
        }
        if self.config.run.imports:
            # A leader has written the plan's config there, where nobody else may (`store.refuse_unsafe`).
            environment[TRUST] = os.pathsep.join(
                filter(None, (environment.get(TRUST), str(self.store.root)))
            )
        if len(plan.members) > 1:
            assert plan.coordinator is not None
            environment |= {
                "JAX_COORDINATOR_ADDRESS": plan.coordinator,
                "JAX_NUM_PROCESSES": str(len(plan.members)),
                "JAX_PROCESS_ID": str(number),
            }
            if number == 0:
                environment["JAX_COORDINATOR_BIND_ADDRESS"] = plan.coordinator
        running = replace(
            self.node, state="running", generation=plan.generation, rank=None, end=None
        )
        # Before it is so, lest this supervisor be gone in between and nobody know of the process.
        self.store.publish(replace(running, sequence=self.node.sequence + 1))
        command = self.command(config_of(self.store.root, plan))
        fence = CUT_OFF * self.options.node_timeout
        self.child = TrainingProcess(
            command, environment, files, plan.generation, number, fence
        )
        self.saved = None
        self.going = False
        self.node = replace(running, rank=self.child.rank)
        self.store.log(
            "started",
            generation=plan.generation,
            rank=number,
            pid=self.child.process.pid,
        )

    def _end(self) -> bool:
        """Ends its process; returns whether none is left."""
        child = self.child
        if child is None:
            return True
        if self.killed_at is None:
            self.killed_at = time.monotonic()
            child.kill()
        deadline = time.monotonic() + 2.0
        while (end := child.ended()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if end is None:
            if time.monotonic() - self.killed_at < UNENDED:
                return False
            report(
                f"the process {child.process.pid} does not end, not even by SIGKILL; this node leaves the run."
            )
            self.node = replace(self.node, leaving=True, state="idle")
        elif self.node.end is None:
            self._log_end(child, end)
        child.close()
        self.child = None
        self.killed_at = None
        return True

    # --- the store

    def _publish(self, now: float) -> None:
        """Writes its record, when it has changed in more than its ages, or a heartbeat is due."""
        if self.stopping and not self.node.leaving:
            self.node = replace(self.node, leaving=True)
            self.store.log("left")
        if now - self.published_at >= self.options.heartbeat or self._is_news():
            self.node = replace(
                self.node, sequence=self.node.sequence + 1, wall=time.time()
            )
            self.store.publish(self.node)
            self.published = self.node
            self.published_at = now

    def _is_news(self) -> bool:
        node = self.node
        last = self.published
        if last is None or any(
            getattr(node, name) != getattr(last, name) for name in NEWS
        ):
            return True
        # A rank that was slow and no longer is must not be taken for stuck.
        return bool(
            node.rank
            and last.rank
            and last.rank.phase_age > self.options.heartbeat > node.rank.phase_age
        )

    def _cut_off(self, seconds: float, error: OSError) -> int | None:
        """Ends the process, and later the supervisor, where the store refuses: others may take this node for lost, and
        form without it.
        """
        if (
            seconds > CUT_OFF * self.options.node_timeout
            and self.child is not None
            and self.node.end is None
        ):
            report(
                f"the run directory cannot be used ({refusal(error)}); the process on this node is ended."
            )
            self._end()
        if seconds > GIVEN_UP:
            report(
                f"the run directory cannot be used for {GIVEN_UP:.0f} s: {refusal(error)}."
            )
            return 75
        return None

    # --- following

    def _follow(self) -> int | None:
        """Does what the newest plan asks of this node; returns the exit code where it asks to end."""
        plan = self.view.plan
        if self.node.leaving and self.view.may_go(self.node):
            return 75 if self._end() else None
        if plan is None or self.view.is_old(plan):
            return None
        if plan.state == "over":
            if not self._end():
                return None
            if plan.kind == "refused" and plan.leader != self.node.name:
                report(f"{plan.reason.rstrip('.')}.")
            return plan.code
        if self.child is not None and self.child.generation < plan.generation:
            if not self._end():
                return None
            self.node = replace(self.node, state="idle")
        if plan.state == "forming" and self.node.acked < plan.generation:
            port = self.injector.port(free_port(self.node.address))
            self.node = replace(
                self.node, state="idle", acked=plan.generation, port=port
            )
        is_member = (self.node.name, self.node.incarnation) in zip(
            plan.members, plan.incarnations, strict=False
        )
        if (
            plan.state == "running"
            and is_member
            and self.child is None
            and self.node.generation < plan.generation
        ):
            self._start(plan)
        asked = self.asked_to_stop >= plan.generation or self.node.end is not None
        if plan.state == "stopping" and self.child is not None and not asked:
            self.asked_to_stop = plan.generation
            self.child.stop()
        return None

    def _fence(self) -> None:
        for node in self.view.nodes:
            silent = (
                node.age >= self.options.node_timeout
                and node.generation < self.view.generation
            )
            is_here = node.machine and node.machine == self.node.machine
            if silent and is_here and kill_left_behind(node, self.store.root):
                report(
                    f"the process of {node.name}, which is silent, is ended: the run goes on without it."
                )


def free_port(address: str) -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            # The address is one that others know this machine by.
            probe.bind(("", 0))
        return probe.getsockname()[1]

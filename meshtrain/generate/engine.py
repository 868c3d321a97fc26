"""Many requests through one model at once: each gets a slot as one is free, all slots decode together (continuous
batching: Yu et al. 2022).

    submit ──► waiting ──prefill──► slot 0 ███████████████░░░ a request
       │          (bounded: Busy)   slot 1 ██████┊████████░░░ one ends, the next takes its slot while the others go on
       └─► Ticket.cancel            slot 2 ░░░░░░░░░██████░░░ free slots decode what nobody reads

    device   │ decode n │ decode n + 1 │ decode n + 2 │    The host dispatches a step before it reads the one before:
    host          │ reads n, tells │ reads n + 1, tells │  turning tokens into text costs the device nothing.

A program that is compiled ahead (`warm`) is compiled on a thread of its own: a request that needs one more waits, and
the others go on. A request's end is known one step late, so that its slot decodes once more, which nobody reads. A
request's answer depends on nothing beside it: its noise follows from its own seed and positions.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtrain.generate.compiling import CompilingAhead, reason
from meshtrain.generate.request import (
    Busy,
    Closed,
    EngineStatus,
    Finish,
    Listener,
    Piece,
    Request,
    Running,
    Ticket,
)
from meshtrain.generate.text import Spelling

# A server listens before JAX is imported.
if TYPE_CHECKING:
    from meshtrain.generate.opened import Opened
    from meshtrain.generate.programs import Name

log = logging.getLogger(__name__)
# Requests whose token a program chooses, each with its place in the program's arrays (None: they are of one slot).
Places = list[tuple[int | None, Running]]
MOST_FAILURES = (
    # Of the device's programs, with nothing read between them, until the engine gives up
    3
)


class Engine:
    """Runs requests; a context manager, which is a thread of its own from `start` to `close`.

    `length`: positions of a slot, prompt and answer together. `waiting`: requests that may wait for a slot. `keep`
    False takes the weights over from `opened.model`, which can then be used for nothing else. `decoding`: what makes
    the device's programs.
    """

    def __init__(
        self,
        opened: "Opened",
        slots: int = 8,
        length: int | None = None,
        waiting: int = 64,
        keep: bool = True,
        decoding: Callable[..., Any] | None = None,
    ) -> None:
        self.opened = opened
        self.slots = slots
        self.length = opened.length if length is None else length
        self._most_waiting = waiting
        self._decoding = (decoding or opened.decoding)(
            opened.model, slots, self.length, keep
        )
        self._spelling = Spelling(opened.tokenizer)
        self._state: Any = None
        self._running: list[Running | None] = [None] * slots
        self._unread: deque[tuple[Any, Places]] = (
            deque()
        )  # of programs that were dispatched: their arrays, for whom
        self._failed = 0  # programs in a row
        self._counts = Counter[str]()
        self._turn_began: float | None = None
        self._last_step = 0.0
        self._compiling = False
        # What follows is shared between threads, under `_changed`.
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._broken = ""
        self._closing: str | None = None  # now, drain
        self._thread: threading.Thread | None = None
        # None: whoever needs a program compiles it
        self._ahead: CompilingAhead | None = None

    # --- from any thread

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queues a request.

        The listener is called from the engine's thread, at last with a finish; if it raises, its request is cancelled.

        Busy if as many wait as may, ConfigError for a request that no state of the engine could answer, Closed if none
        will be.
        """
        request.check(self.length, self._decoding.vocabulary)
        ticket = Ticket(request, listener, self._notify)
        with self._changed:
            if self._broken or self._closing is not None:
                raise Closed(self._broken or "the engine is closed.")
            if len(self._waiting) >= self._most_waiting + self._running.count(None):
                raise Busy(
                    f"{len(self._waiting)} requests wait already, as many as may."
                )
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    @property
    def status(self) -> EngineStatus:
        with self._changed:
            return EngineStatus(
                self.slots,
                self.slots - self._running.count(None),
                len(self._waiting),
                **self._counts,
                compiled=self._decoding.compiled,
                last_step=self._last_step,
                turn_began=self._turn_began,
                broken=self._broken,
                compiling=self._compiling
                or (bool(self._waiting) and self._admissible() is None),
            )

    def start(self) -> "Engine":
        """Begins to answer, on a thread of its own."""
        with self._changed:
            if self._thread is None and self._closing is None:
                self._thread = threading.Thread(
                    target=self._run, name="meshtrain engine", daemon=True
                )
                self._thread.start()
        return self

    def warm(self, patience: float) -> int:
        """Compiles all programs on a thread of its own, see `CompilingAhead.wait`; how many are still to come."""
        self._ahead = CompilingAhead(self._decoding, self._changed, self._wanted)
        self._ahead.start()
        return self._ahead.wait(patience)

    @property
    def note(self) -> str:
        """A sentence on how the weights are held, where they are not as they came."""
        return self._decoding.note

    @property
    def warming(self) -> bool:
        """Returns whether a thread compiles programs that may be needed."""
        return self._ahead is not None and self._ahead.running

    def close(self, drain: bool = False) -> None:
        """Takes no more requests and ends; `drain`: when all that were taken are answered, else they end with finish
        cancelled.
        """
        with self._changed:
            if self._closing != "now":
                self._closing = "drain" if drain else "now"
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        elif thread is None:
            self._finish_up()
        if self._ahead is not None:
            self._ahead.close()

    def reuse(self, kept: dict[Any, Any]) -> None:
        """Has the programs that an earlier engine of the same model left in `kept`, and leaves its own there."""
        self._decoding.reuse(kept)

    def free(self) -> None:
        """Frees the weights of an engine that is closed."""
        self._decoding.free()

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the engine's thread

    def step(self) -> bool:
        """One turn: what is cancelled leaves, free slots are filled, a step is dispatched, the one before it is read.

        Whether there is more to do. For one thread, which is the engine's own after `start`.
        """
        self._turn_began = time.monotonic()
        self._let_go()
        try:
            dispatched = self._admit()
            dispatched = self._decode() or dispatched
            self._read(keep=1 if dispatched and not self._decoding.synchronous else 0)
        except Exception as error:
            self._fail(error)
        self._turn_began = None
        self._compiling = False
        self._last_step = time.monotonic()
        return self._has_work()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (
                    self._closing != "now"
                    and (self._closing is None or self._has_work())
                    and not self._can_step()
                ):
                    self._changed.wait()
                if self._closing == "now" or not self._has_work():
                    break
            self.step()
        self._finish_up()

    def _finish_up(self) -> None:
        """Ends what there is when the engine closes; where it has no thread, drains it."""
        while self._closing == "drain" and self._has_work():
            self.step()
        self._end_all("cancelled", "")
        self._unread.clear()
        self._state = None

    def _let_go(self) -> None:
        """Frees the slot of what was cancelled, or its place among those that wait."""
        for running in self._occupied():
            if running.ticket.cancelled:
                self._end(running, running.last("cancelled"))
        with self._changed:
            cancelled = [ticket for ticket in self._waiting if ticket.cancelled]
            for ticket in cancelled:
                self._waiting.remove(ticket)
        for ticket in cancelled:
            self._end_ticket(ticket, Piece("", finish="cancelled"))

    def _admit(self) -> bool:
        """Prefills free slots in the order of submission; whether there were any.

        While others decode one a turn, so that they go on.
        """
        most = 1 if self._occupied() else self.slots
        prefilled = False
        for slot in [
            slot for slot, running in enumerate(self._running) if running is None
        ][:most]:
            with self._changed:
                ticket = self._admissible()
                if ticket is None:
                    break
                self._waiting.remove(ticket)
                request = ticket.request
                tokens = np.asarray(request.tokens, np.int32)
                running = Running(ticket, self.opened.ends, self._spelling, self.length)
                self._running[slot] = running
            if self._state is None:
                self._state = self._decoding.empty()
            self._compiling |= not self._decoding.is_compiled(self._prefill_of(request))
            self._state, picked = self._decoding.prefill(
                self._state, slot, tokens, request.sampling
            )
            self._unread.append((picked, [(None, running)]))
            self._count(prompt_tokens=len(tokens))
            prefilled = True
            if self._decoding.synchronous:
                self._read(keep=0)
        return prefilled

    def _decode(self) -> bool:
        running_slots = [
            (slot, running)
            for slot, running in enumerate(self._running)
            if running is not None
        ]
        places: Places = [
            (slot, running)
            for slot, running in running_slots
            if running.dispatched < running.most
        ]
        if not places:
            return False
        logprobs = any(
            running.ticket.request.logprobs is not None for _, running in places
        )
        self._compiling |= not self._decoding.is_compiled(("decode", logprobs))
        self._state, picked = self._decoding.decode(self._state, logprobs)
        for _, running in places:
            running.dispatched += 1
        self._unread.append((picked, places))
        self._count(steps=1)
        return True

    def _read(self, keep: int) -> None:
        """Waits for what was dispatched, but for the last `keep`, and tells it."""
        while len(self._unread) > keep:
            picked, places = self._unread.popleft()
            wanted = [(at, running) for at, running in places if not running.ended]
            if not wanted:
                continue
            arrays: list[Any] = [None if x is None else np.asarray(x) for x in picked]
            self._failed = 0
            for at, running in wanted:
                *chosen, accepted = (
                    x if x is None or at is None else x[at] for x in arrays
                )
                if accepted is None:
                    self._tell(running, *chosen)
                else:
                    self._tell_drafted(running, chosen, bool(accepted))

    def _tell_drafted(
        self, running: Running, chosen: list[Any], accepted: bool
    ) -> None:
        """Tells the token that a step has chosen, and the one behind it if its draft was right."""
        self._count(drafts=1, accepted_drafts=int(accepted))
        first, second = ([x if x is None else x[k] for x in chosen] for k in range(2))
        self._tell(running, *first)
        if accepted and not running.ended:
            running.dispatched += 1
            self._count(saved=1)
            self._tell(running, *second)

    def _tell(self, running: Running, token: Any, *logprobs: Any) -> None:
        self._count(tokens=1)
        try:
            piece = running.next(int(token), *logprobs)
        except Exception as error:
            # nothing on the device is lost
            log.exception("a token could not be told")
            problem = f"a token could not be told: {reason(error)}."
            piece = Piece("", tokens=running.tokens, finish="error", problem=problem)
        if piece is not None and piece.finish is not None:
            self._end(running, piece)
        elif piece is not None:
            running.ticket.tell(piece)

    def _end(self, running: Running, piece: Piece) -> None:
        running.ended = True
        with self._changed:
            self._running[self._running.index(running)] = None
        self._end_ticket(running.ticket, piece)

    def _end_ticket(self, ticket: Ticket, piece: Piece) -> None:
        self._count(requests=1)
        ticket.tell(piece)

    def _end_all(self, finish: Finish, problem: str, waiting: bool = True) -> None:
        for running in self._occupied():
            self._end(running, running.last(finish, problem=problem))
        tickets: list[Ticket] = []
        if waiting:
            with self._changed:
                tickets = list(self._waiting)
                self._waiting.clear()
        for ticket in tickets:
            self._end_ticket(ticket, Piece("", finish=finish, problem=problem))

    def _fail(self, error: Exception) -> None:
        """A program of the device has failed: what lay there is lost, with all requests that had a slot.

        The others get a new state.
        """
        problem = f"the device's program failed: {reason(error)}."
        log.error(problem, exc_info=error)
        self._failed += 1
        self._count(failures=1)
        # freed before the next one is made
        self._state = None
        self._unread.clear()
        broken = self._failed >= MOST_FAILURES
        if broken:
            with self._changed:
                self._broken = problem
        self._end_all("error", problem, waiting=broken)

    # --- what there is

    def _wanted(self) -> "list[Name]":
        with self._changed:
            return [self._prefill_of(ticket.request) for ticket in self._waiting]

    def _prefill_of(self, request: Request) -> "Name":
        return "prefill", self._decoding.bucket(len(request.tokens))

    def _admissible(self) -> Ticket | None:
        """Returns the first that waits for nothing but a slot."""
        compiled = self._decoding.is_compiled
        ready = (
            t
            for t in self._waiting
            if not self.warming or compiled(self._prefill_of(t.request))
        )
        return next(ready, None)

    def _occupied(self) -> list[Running]:
        return [running for running in self._running if running is not None]

    def _has_work(self) -> bool:
        return bool(self._waiting or self._unread or self._occupied())

    def _can_step(self) -> bool:
        """Returns whether a turn would do anything: a waiting request may wait for a program."""
        going = self._unread or self._occupied() or self._admissible()
        return bool(going) or any(ticket.cancelled for ticket in self._waiting)

    def _count(self, **more: int) -> None:
        with self._changed:
            self._counts.update(more)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

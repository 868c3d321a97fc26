"""Nodes as network namespaces of this machine, joined by a wire that a thread carries: it may be cut, slow, or lose
what it carries.

Each node has a tap device, whose frames are read here and given to the others; so no queueing discipline of the kernel
is needed. The name of the machine is, on each node, that node's own address.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

TUNSETIFF, TAP, PLAIN = 0x400454CA, 0x0002, 0x1000
LONGEST = 9000  # bytes of a frame's load


class NoNetwork(Exception):
    """This machine does not let us make one."""


class Wire:
    """The network of some nodes.

    `cut`: nothing passes; `delay`: seconds of each frame; `loss`: share of the frames that is lost.
    """

    def __init__(self, nodes: list[str], prefix: str) -> None:
        self.cut, self.delay, self.loss = False, 0.0, 0.0
        self.namespaces = {node: f"{prefix}-{node}" for node in nodes}
        self.addresses = {node: f"10.77.0.{k + 1}" for k, node in enumerate(nodes)}
        self._taps: list[int] = []
        self._draw = random.Random(0)
        self._closed = threading.Event()
        if os.getuid() or not shutil.which("ip"):
            raise NoNetwork("namespaces need root and iproute2")
        try:
            for node in nodes:
                self._make(node)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise NoNetwork(
                f"a namespace with a tap device cannot be made here: {error}"
            ) from None
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def inside(self, node: str) -> tuple[str, ...]:
        """The words before a command that runs on a node."""
        return ("ip", "netns", "exec", self.namespaces[node])

    def close(self) -> None:
        self._closed.set()
        if hasattr(self, "_thread"):
            self._thread.join()
        for tap in self._taps:
            os.close(tap)
        for name in self.namespaces.values():
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def _make(self, node: str) -> None:
        name, address, device = (
            self.namespaces[node],
            self.addresses[node],
            f"tap{os.getpid()}{node}"[:15],
        )
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._taps.append(tap)
        fcntl.ioctl(
            tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), TAP | PLAIN)
        )
        hosts = Path("/etc/netns", name)
        hosts.mkdir(parents=True, exist_ok=True)
        (hosts / "hosts").write_text(
            f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
        )
        for words in (
            f"ip netns add {name}",
            f"ip link set {device} netns {name}",
            f"ip -n {name} addr add {address}/24 dev {device}",
            f"ip -n {name} link set {device} mtu {LONGEST} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(words.split(), check=True, capture_output=True)

    def _carry(self) -> None:
        waiting: list[
            tuple[float, int, int, bytes]
        ] = []  # when a frame is there, its number, from where, and it
        number = 0
        while not self._closed.is_set():
            patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for tap in select.select(self._taps, [], [], min(patience, 0.1))[0]:
                with contextlib.suppress(OSError):
                    frame = os.read(tap, LONGEST + 100)
                    number += 1
                    if not self.cut and self._draw.random() >= self.loss:
                        heapq.heappush(
                            waiting, (time.monotonic() + self.delay, number, tap, frame)
                        )
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, source, frame = heapq.heappop(waiting)
                for tap in self._taps:
                    if tap != source and not self.cut:
                        with contextlib.suppress(
                            OSError
                        ):  # its queue is full, or it is down: lost, as on any wire
                            os.write(tap, frame)

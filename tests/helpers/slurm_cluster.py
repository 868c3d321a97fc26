"""A Slurm cluster of Debian's packages on this machine, for tests: a controller, and nodes that are namespaces of their
own.

    this machine        slurmctld, munged, sbatch        10.91.0.1 ─┐
    n1, n2, n3          slurmd in a set of namespaces:   10.91.0.11 ├─ a bridge
                        host name, network, processes        ...   ─┘

A node has an own name, address and process tree, and shares the files. Its power is cut by killing the first process of
its process
namespace: the kernel ends all that runs there. Everything ends with the process that started it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from meshtrain.orphans import die_with_parent

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
BRIDGE, NETWORK = "mtengines", "10.91.0"
NAMESPACES = ("--uts", "--net", "--pid", "--mount", "--fork")
CORES, GPUS = 4, 4
# The first process of a node waits for its network, and then for what is orphaned there.
NODE = """\
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
until [ -e "$2/$1.up" ]; do sleep 0.05; done
while :; do sleep 0.5; done
"""
SETTINGS = """\
ClusterName=one-machine
SlurmctldHost={host}({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=20
ReturnToService=2
GresTypes=gpu
NodeName=n[1-{nodes}] NodeAddr={network}.[11-{last}] CPUs={cores} RealMemory=4000 Gres=gpu:{gpus}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


def missing() -> str:
    """Returns why no cluster can be started here; nothing if one can."""
    if gone := [name for name in PROGRAMS if _program(name) is None]:
        return f"{', '.join(gone)} is not installed (apt-get install slurm-wlm munge iproute2)"
    if os.geteuid() != 0:
        return "namespaces of nodes need root"
    links = "ip link add mt0 type bridge && ip link add mt1 type veth peer name mt2"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", links], capture_output=True
    )
    return (
        f"no nodes as namespaces here: {tried.stderr.decode().strip()}"
        if tried.returncode
        else ""
    )


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Waits until something holds; AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, (
            f"after {seconds:.0f} s there was not yet: {what}"
        )
        time.sleep(0.2)


class SlurmCluster:
    """A running cluster of n1, n2, ...; `variables` are what its commands need."""

    def __init__(self, directory: Path, nodes: int = 3) -> None:
        self.directory, self.nodes = directory, [f"n{i + 1}" for i in range(nodes)]
        self.variables = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*reversed(self.nodes), "slurmctld", "munged"]:
            self._end(name)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)

    def _start(self) -> None:
        here, count = self.directory, len(self.nodes)
        (here / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        addresses = {"localhost": "127.0.0.1", host: f"{NETWORK}.1"} | {
            name: self._address(name) for name in self.nodes
        }
        (here / "hosts").write_text(
            "".join(f"{address} {name}\n" for name, address in addresses.items())
        )
        text = SETTINGS.format(
            host=host,
            network=NETWORK,
            directory=here,
            nodes=count,
            last=10 + count,
            cores=CORES,
            gpus=GPUS,
        )
        (here / "slurm.conf").write_text(text)
        # Slurm counts the GPUs whose device files there are; these are as /dev/null.
        for i in range(GPUS):
            os.mknod(here / f"gpu{i}", 0o20666, os.makedev(1, 3))
        gpus = f"NodeName=n[1-{count}] Name=gpu File={here}/gpu[0-{GPUS - 1}]\n"
        (here / "gres.conf").write_text(gpus)
        (here / "munge.key").write_bytes(os.urandom(256))
        (here / "munge.key").chmod(0o400)
        files = [
            f"--{name}={here}/munge.{name.partition('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        self._launch("munged", ["munged", "--foreground", "--force", *files])
        # A bridge of a cluster that was killed has no ports left.
        if not any(Path("/sys/class/net").glob(f"{BRIDGE}/lower_*")):
            subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        for words in (["add", BRIDGE, "type", "bridge"], ["set", BRIDGE, "up"]):
            subprocess.run(["ip", "link", *words], check=True)
        subprocess.run(
            ["ip", "addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE], check=True
        )
        until((here / "munge.socket").exists, 20, "munge's socket")
        self._launch("slurmctld", ["slurmctld", "-D", "-i"])
        for name in self.nodes:
            self.start_node(name)
        until(
            lambda: (
                self.command("sinfo", "-h", "-t", "idle", "-o", "%D").strip()
                == str(count)
            ),
            60,
            "idle nodes",
        )

    def _address(self, node: str) -> str:
        return f"{NETWORK}.{10 + int(node[1:])}"

    def _launch(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        with open(self.directory / f"{name}.out", "ab") as output:
            process = subprocess.Popen(
                [_program(words[0]) or words[0], *words[1:]],
                env=os.environ | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._processes[name] = process
        return process

    def _end(self, name: str) -> None:
        if process := self._processes.pop(name, None):
            for pid in children(process.pid) if name in self.nodes else ():
                _kill(pid)
            process.kill()
            process.wait()

    # --- nodes

    def start_node(self, node: str) -> None:
        (self.directory / f"{node}.up").unlink(missing_ok=True)
        (self.directory / f"spool-{node}").mkdir(exist_ok=True)
        words = ["unshare", *NAMESPACES, "--kill-child", "--mount-proc"]
        process = self._launch(
            node, [*words, "bash", "-c", NODE, "node", node, str(self.directory)]
        )
        until(lambda: children(process.pid), 20, f"the first process of {node}")
        first, link = self._first(node), f"{BRIDGE[:8]}{node}"
        until(
            lambda: (
                os.readlink(f"/proc/{first}/ns/net") != os.readlink("/proc/self/ns/net")
            ),
            20,
            "a network",
        )
        subprocess.run(
            [
                "ip",
                "link",
                "add",
                link,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(first),
            ],
            check=True,
        )
        subprocess.run(["ip", "link", "set", link, "master", BRIDGE, "up"], check=True)
        network = f"ip link set lo up; ip addr add {self._address(node)}/24 dev eth0; ip link set eth0 up"
        subprocess.run(
            ["nsenter", "--net", "--target", str(first), "sh", "-c", network],
            check=True,
        )
        (self.directory / f"{node}.up").touch()
        until(lambda: "n" in self.on(node, "hostname"), 20, f"the name of {node}")
        self.start_daemon(node)

    def kill_node(self, node: str) -> None:
        """Cuts its power."""
        self._end(node)
        subprocess.run(
            ["ip", "link", "del", f"{BRIDGE[:8]}{node}"], capture_output=True
        )

    def start_daemon(self, node: str) -> None:
        self.on(node, "slurmd", "-N", node)

    def kill_daemon(self, node: str) -> None:
        """Ends slurmd alone; what runs on the node goes on."""
        _kill(
            int((self.directory / f"{node}.pid").read_text()),
            inside=self._processes[node].pid,
        )

    def on(self, node: str, *words: str) -> str:
        """Runs a command on a node; returns what it printed."""
        entered = [
            "nsenter",
            "--all",
            "--target",
            str(self._first(node)),
            f"--wd={os.getcwd()}",
        ]
        return self.command(*entered, *words)

    def processes(self, node: str, words: str) -> list[int]:
        """Returns the processes of a node whose command has some words, by their numbers outside of it."""
        return [
            pid
            for pid in sorted(tree(self._processes[node].pid))
            if words in command_of(pid)
        ]

    def _first(self, node: str) -> int:
        return children(self._processes[node].pid)[0]

    # --- jobs

    def command(self, *words: str, check: bool = True) -> str:
        """Runs a command of Slurm's; returns what it printed."""
        ended = subprocess.run(
            words,
            env=os.environ | self.variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not check or ended.returncode == 0, f"{' '.join(words)}: {ended.stderr}"
        return ended.stdout

    def submit(self, script: Path, *words: str) -> str:
        """Returns the number of the job."""
        return self.command("sbatch", "--parsable", *words, str(script)).strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns what Slurm knows of a job: JobState, ExitCode, Restarts, NodeList, ..."""
        text = self.command("scontrol", "show", "job", "-o", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def ended(self, number: str, seconds: float = 300) -> dict[str, str]:
        """Waits for a job's end; returns what Slurm knows of it."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        until(
            lambda: self.job(number)["JobState"] in over,
            seconds,
            f"the end of job {number}",
        )
        return self.job(number)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in tasks for child in file.read_text().split()]
    return []


def tree(pid: int) -> Iterable[int]:
    for child in children(pid):
        yield child
        yield from tree(child)


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
        )
    return ""


def _kill(pid: int, inside: int = 0) -> None:
    """SIGKILL; `inside`: the process below which a namespace has given the number."""
    for outer in tree(inside) if inside else [pid]:
        status = Path(f"/proc/{outer}/status").read_text()
        if (
            not inside
            or f"{pid}" == status.partition("NSpid:")[2].partition("\n")[0].split()[-1]
        ):
            os.kill(outer, signal.SIGKILL)
            return


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and all that it has started, at once."""
    for each in [pid, *tree(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)

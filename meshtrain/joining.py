"""Which process of how many this one is, by its environment: read and compared before JAX is asked to join them,
without JAX.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID     set for each process; an indexed Kubernetes job
                                                                   numbers its own
    SLURM_NTASKS, SLURM_PROCID, SLURM_STEP_NODELIST ...            set by srun, and read by JAX itself

JAX ends in a traceback, or waits for minutes, where these are missing or do not agree.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshtrain.errors import ConfigError, short

Variables = Mapping[str, str]
ADDRESS = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PORT = "JAX_COORDINATOR_PORT"
PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
INDEX = "JOB_COMPLETION_INDEX"
TASKS = "SLURM_NTASKS"
NODES = "SLURM_STEP_NUM_NODES"
LIST = "SLURM_STEP_NODELIST"
HOST = r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]@]+)"
MOST_PROCESSES = 2**31 - 1
MOST_PORT = 65535
LARGEST = 2**63 - 1
# Of a list of nodes as Slurm writes it: names, with numbers in brackets.
NODE = r"[\w.-]+(\[[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*\][\w.-]*)*"
# JAX's ports of a job are the last ones.
SLURM_PORTS = 2**12


@dataclass(frozen=True)
class Place:
    """This process among those of a run.

    `listen`: where the first process has to listen; `by_slurm`: JAX reads the rest itself.
    """

    address: str | None
    processes: int
    process: int
    listen: str
    by_slurm: bool = False


def place_of(environment: Variables) -> Place | None:
    """Returns what an environment says of this process, None if it is alone; ConfigError for what is missing or does
    not agree.
    """
    tasks = (
        _number(environment, TASKS, 1, MOST_PROCESSES) if environment.get(TASKS) else 1
    )
    address = environment.get(ADDRESS)
    if address:
        _check_address(ADDRESS, address, "of the first process")
    _check_others(environment)
    # An address alone tells JAX where the processes of Slurm meet.
    if address and (PROCESSES in environment or tasks == 1):
        return _read_jax(environment, address)
    if tasks > 1:
        return _read_slurm(environment, tasks)
    if environment.get(PROCESSES, "1") != "1":
        count = _number(environment, PROCESSES, 1, MOST_PROCESSES)
        raise ConfigError(
            f"{PROCESSES} is {count}, but {ADDRESS} is not set; it must be host:port of the first process."
        )
    return None


def _read_jax(environment: Variables, address: str) -> Place:
    processes = _number(environment, PROCESSES, 1, MOST_PROCESSES)
    indexed = PROCESS not in environment and INDEX in environment
    process = _number(environment, INDEX if indexed else PROCESS, 0, processes - 1)
    # Of which JAX takes its device even so.
    if "SLURM_LOCALID" in environment:
        _number(environment, "SLURM_LOCALID", 0, MOST_PROCESSES)
    return Place(
        address, processes, process, _listen(environment, address.rpartition(":")[2])
    )


def _read_slurm(environment: Variables, tasks: int) -> Place:
    nodes_text = environment.get(LIST)
    if nodes_text is None:
        # in the batch script itself, or in the shell of salloc
        raise ConfigError(
            f"this is one process in a job of Slurm's for {tasks} tasks; start it with srun, as in "
            f"srun meshtrain train, which starts all of them ({TASKS}=1 before the command runs it alone)."
        )
    job = _number(environment, "SLURM_JOB_ID", 0, LARGEST)
    process = _number(environment, "SLURM_PROCID", 0, tasks - 1)
    _number(environment, "SLURM_LOCALID", 0, process)
    hosts = _count_hosts(nodes_text)
    if (
        NODES in environment
        and (nodes := _number(environment, NODES, 1, tasks)) != hosts
    ):
        raise ConfigError(
            f"{NODES} is {nodes}, but {LIST} {short(repr(nodes_text))} names {hosts}; they must agree."
        )
    if hosts > tasks:
        raise ConfigError(
            f"{LIST} names {hosts} nodes, but {TASKS} is {tasks}; each node of a step has a task."
        )
    if (step := environment.get("SLURM_STEP_NUM_TASKS")) and step != str(tasks):
        raise ConfigError(
            f"{TASKS} is {tasks}, but SLURM_STEP_NUM_TASKS is {short(repr(step))}; they must agree."
        )
    address = environment.get(ADDRESS)
    port = str(job % SLURM_PORTS + MOST_PORT - SLURM_PORTS + 1)
    if address:
        port = address.rpartition(":")[2]
    elif PORT in environment:
        port = str(_number(environment, PORT, 1, MOST_PORT))
    return Place(address, tasks, process, _listen(environment, port), by_slurm=True)


def _check_others(environment: Variables) -> None:
    """Raises ConfigError for other variables that JAX reads when it joins processes."""
    devices = environment.get("JAX_LOCAL_DEVICE_IDS")
    if devices and not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", devices):
        raise ConfigError(
            f"JAX_LOCAL_DEVICE_IDS is {short(repr(devices))}; it must be numbers of devices, as 0,1."
        )
    for name in ("JAX_PARTITION_INDEX", "JAX_SLICE_INDEX"):
        if name in environment:
            _number(environment, name, 0, MOST_PROCESSES)


def _listen(environment: Variables, port: str) -> str:
    address = environment.get(BIND)
    if not address:
        return f"[::]:{port}"
    _check_address(BIND, address, "at which the first process listens")
    return address


def _check_address(name: str, address: str, which: str) -> None:
    match = re.fullmatch(rf"{HOST}:([0-9]{{1,5}})", address)
    if match is None or not 1 <= int(match[2]) <= MOST_PORT:
        legal = f"it must be host:port {which}, with a port from 1 to {MOST_PORT}"
        raise ConfigError(f"{name} is {short(repr(address))}; {legal}.")


def _count_hosts(text: str) -> int:
    """Returns how many nodes a list of Slurm's names: node[001-003,7],other are five."""
    if not re.fullmatch(rf"{NODE}(,{NODE})*", text, re.ASCII):
        raise ConfigError(
            f"{LIST} is {short(repr(text))}; it must be a list of nodes, as node[01-04]."
        )
    hosts = 0
    for node in re.split(r",(?![^\[]*\])", text):
        count = 1
        for ranges in re.findall(r"\[([^\]]*)\]", node):
            count *= sum(_length(part) for part in ranges.split(","))
        hosts += count
    return hosts


def _length(part: str) -> int:
    first, _, last = part.partition("-")
    if last and int(last) < int(first):
        raise ConfigError(
            f"{LIST} has the range {short(part)}, which ends before it begins."
        )
    return int(last or first) - int(first) + 1


def _number(environment: Variables, name: str, least: int, most: int) -> int:
    text = environment.get(name)
    if (
        text is None
        or not re.fullmatch("[0-9]{1,19}", text)
        or not least <= int(text) <= most
    ):
        value = "not set" if text is None else short(repr(text))
        legal = (
            f"a whole number from {least} to {most}"
            if most < LARGEST
            else "a whole number"
        )
        raise ConfigError(
            f"{name} is {value}; a process that joins others needs it, and it must be {legal}."
        )
    return int(text)

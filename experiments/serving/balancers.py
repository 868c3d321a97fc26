"""HAProxy and nginx with the files of configs/serving/, as they stand there but for ports and addresses."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments import bench
from experiments.serving.servers import ROOT, status
from meshtrain.survive.supervisor import free_port

CONFIGS = {
    "haproxy": ROOT / "configs/serving/haproxy.cfg",
    "nginx": ROOT / "configs/serving/nginx.conf",
}
ADDRESSES = "10.0.0.1:8000", "10.0.0.2:8000"  # of the servers, in the files
LISTENS = {"haproxy": "bind :8080", "nginx": "listen 8080"}
READY = 10.0


def missing() -> list[str]:
    return [program for program in CONFIGS if shutil.which(program) is None]


def checks(balancer: str, config: Path, work: Path) -> list[str]:
    """The command that holds a config against the program's own rules."""
    nginx = ["nginx", "-t", "-p", str(work), "-c", str(config)]
    return nginx if balancer == "nginx" else ["haproxy", "-c", "-f", str(config)]


@contextlib.contextmanager
def balancer(name: str, ports: Sequence[int], work: Path) -> Iterator[int]:
    """The port of a balancer over two servers of this machine."""
    port, config = free_port("127.0.0.1"), work / CONFIGS[name].name
    text = CONFIGS[name].read_text()
    listens = (
        LISTENS[name]
        .replace(":8080", "127.0.0.1:8080")
        .replace(" 8080", " 127.0.0.1:8080")
    )
    changes = {LISTENS[name]: listens.replace("8080", str(port))}
    changes |= {
        address: f"127.0.0.1:{port}"
        for address, port in zip(ADDRESSES, ports, strict=True)
    }
    for old, new in changes.items():
        assert text.count(f"{old}") == 1, f"{old} is not once in {CONFIGS[name]}"
        text = text.replace(old, new)
    config.write_text(text)
    foreground = (
        ["-p", str(work), "-c", str(config), "-g", "daemon off;"]
        if name == "nginx"
        else ["-f", str(config)]
    )
    with (work / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([name, *foreground], stdout=log, stderr=log)
    try:
        healthy = lambda: status(f"http://127.0.0.1:{port}/health") == 200
        if not bench.until(healthy, READY, alive=lambda: process.poll() is None):
            raise RuntimeError(
                f"{name} did not start:\n{(work / f'{name}.log').read_text()}"
            )
        yield port
    finally:
        process.terminate()
        process.wait(10)

"""Executes a notebook's cells in a fresh kernel of the Python that runs this. Needs the extra `notebooks`."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from experiments import quick_compile
from experiments.notebooks.notebook import Output, merged
from experiments.notebooks.source import NOTEBOOKS, Cell
from meshtrain.errors import ConfigError

LONGEST = 300  # seconds of a cell, so that one that hangs is named
# Whoever opens a notebook has set none of these; here only the compiler is told to be quick, which changes no output.
UNSET = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
_COMMAND = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
# What goes wrong is said here, in a sentence.
_SILENT = logging.Logger("nbclient", logging.CRITICAL + 1)


class Raised(Exception):
    """A notebook did not come to its end: which cell and why, in a sentence, and the cell's text."""


def check_installed() -> None:
    try:
        import ipykernel  # noqa: F401
        import jupytext  # noqa: F401
        import nbclient  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is missing; pip install -e '.[notebooks]' brings it."
        ) from None


def as_jupytext_reads(text: str) -> list[Cell]:
    """The cells that JupyterLab will show of a source."""
    import jupytext

    notebook = jupytext.reads(text, fmt="py:percent")
    return [
        Cell(c.cell_type, c.source, "varies" in c.metadata.get("tags", []))
        for c in notebook.cells
    ]


def execute(cells: list[Cell]) -> list[list[Output]]:
    """The outputs of each cell, executed in order in one new kernel whose directory is that of the notebooks.

    Raises Raised for a cell that raises, takes longer than LONGEST, or ends its kernel, and for a kernel that does not
    start. The kernel and what it started are ended in any case, an interrupt included.
    """
    import nbformat
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from nbclient import NotebookClient
    from nbclient.exceptions import (
        CellExecutionError,
        CellTimeoutError,
        DeadKernelError,
    )

    class OfThisPython(AsyncKernelManager):
        # Whatever kernel the user has installed under the name python3.
        kernel_spec = KernelSpec(**get_kernel_dict() | {"argv": _COMMAND})

    v4 = nbformat.v4
    of_kind = {"code": v4.new_code_cell, "markdown": v4.new_markdown_cell}
    notebook = v4.new_notebook(cells=[of_kind[cell.kind](cell.text) for cell in cells])
    with tempfile.TemporaryDirectory() as directory:
        # Sockets of this user's alone, where ports would be open to all on the machine (ipykernel 7.4 warns of them).
        kernel = OfThisPython(
            transport="ipc",
            ip=f"{directory}/kernel",
            connection_file=f"{directory}/kernel.json",
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=LONGEST,
            record_timing=False,
            shutdown_kernel="immediate",
            log=_SILENT,
        )
        environment = {
            name: value for name, value in os.environ.items() if name not in UNSET
        }
        environment["XLA_FLAGS"] = " ".join(quick_compile.FLAGS)
        # A profile of its own: no start-up files of the user's.
        environment["IPYTHONDIR"] = f"{directory}/profile"
        try:
            # What it writes past its cells' outputs is no row of the table here.
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with client.setup_kernel(
                cwd=str(NOTEBOOKS), env=environment, cleanup_kc=True, **quiet
            ):
                for position, (cell, executed) in enumerate(
                    zip(cells, notebook.cells, strict=True), 1
                ):
                    try:
                        client.execute_cell(executed, position - 1)
                    except CellExecutionError as error:
                        raise Raised(
                            f"cell {position} raised {error.ename}: {error.evalue}",
                            cell.text,
                        ) from None
                    except CellTimeoutError:
                        raise Raised(
                            f"cell {position} took more than {LONGEST} s.", cell.text
                        ) from None
                    except DeadKernelError:
                        raise Raised(
                            f"cell {position} ended its kernel.", cell.text
                        ) from None
        except RuntimeError as error:
            raise Raised(f"the kernel did not start: {error}") from None
        finally:
            # What the kernel had started, and itself where it was only just starting.
            if (group := getattr(kernel.provisioner, "pgid", None)) is not None:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
    return [
        merged([dict(output) for output in cell.get("outputs", [])])
        for cell in notebook.cells
    ]

"""A run with data and checkpoints in a store, killed twice, goes on on another mesh with the losses of one that was not."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_runs

from meshtrain import stores
from meshtrain.data.input_files import find
from meshtrain.data.prepare import prepare
from meshtrain.data.unit import PrepareOptions

pytest.importorskip("s3fs", reason="needs the extra remote")
pytest.importorskip("moto", reason="needs moto's server")

from store_server import BUCKET, SERVERS, StoreServer, store_server

STEPS = 16
ONE_MESH = ("mesh.data=2", "mesh.tensor=1")
OTHER_MESH = ("mesh.data=1", "mesh.tensor=2")


@pytest.fixture(scope="module", params=SERVERS)
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def server(scheme):
    with store_server(scheme) as server:
        yield server


def start(
    run: Path, source: object, mesh: tuple[str, ...], *more: str
) -> subprocess.Popen:
    given = small_runs.overrides(run, STEPS) + [
        word
        for each in (
            f"data.source={source}",
            "checkpoint.every=3",
            "checkpoint.keep=2",
            *mesh,
            *more,
        )
        for word in ("--set", each)
    ]
    command = [
        sys.executable,
        "-m",
        "meshtrain.train",
        "--config",
        "configs/quickstart.yaml",
    ]
    log = (run.parent / f"{run.name}.log").open("ab")
    return subprocess.Popen([*command, *given], stdout=log, stderr=log)


def finish(run: Path, *how) -> None:
    assert start(run, *how).wait(300) == 0, (
        run.parent / f"{run.name}.log"
    ).read_text()[-2000:]


@pytest.mark.thorough
def test_a_run_killed_twice_resumes_on_another_mesh_to_the_bit(
    tmp_path, server: StoreServer, scheme
):
    root = f"{scheme}://{BUCKET}/run"
    (tmp_path / "text.txt").write_text(
        "".join(f"line {i} of the text\n" for i in range(9000))
    )
    prepare(
        find([str(tmp_path / "text.txt")]).files,
        tmp_path / "shards",
        PrepareOptions(validation=0.0),
    )
    for path in (tmp_path / "shards").rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            stores.upload(
                path, f"{root}/shards/{path.relative_to(tmp_path / 'shards')}"
            )
    run = tmp_path / "run"
    stored = f"checkpoint.directory={root}/checkpoints"
    for step in (6, 9):
        killed = start(run, f"{root}/shards", ONE_MESH, stored, "data.verify=false")

        def kill(method: str, path: str, step=step, killed=killed) -> str | None:
            """Kills in mid upload of a step, of which a part is there already."""
            is_begun = any(f"/{step}/" in p for m, p in server.answered if m == "PUT")
            if method == "PUT" and is_begun and f"/checkpoints/{step}/arrays" in path:
                killed.kill()
            return None

        server.answered.clear()
        server.fault = kill
        assert killed.wait(300) == -signal.SIGKILL
        server.fault = lambda method, path: None
        names = stores.listing(f"{root}/checkpoints")
        assert [
            n for n in names if n.startswith(f"{step}/")
        ] and f"{step}/COMMIT" not in names
        assert f"{step - 3}/COMMIT" in names
        time.sleep(0.1)
    finish(run, f"{root}/shards", OTHER_MESH, stored, "data.verify=false")
    log = (tmp_path / "run.log").read_text()
    assert (
        f"removed {root}/checkpoints/9, which a save or a removal left unfinished"
        in log
    )
    assert f"{STEPS}/COMMIT" in stores.listing(f"{root}/checkpoints")

    undisturbed = tmp_path / "undisturbed"
    finish(undisturbed, tmp_path / "shards", ONE_MESH, "checkpoint.keep=100")
    there = undisturbed / "checkpoints" / "6"
    finish(
        tmp_path / "on", tmp_path / "shards", OTHER_MESH, f"checkpoint.resume={there}"
    )
    expected = small_runs.losses(undisturbed)[:6]
    expected += [row["loss"] for row in small_runs.rows(tmp_path / "on")]
    assert small_runs.losses(run) == expected

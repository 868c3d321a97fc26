"""Checkpoints in a store: a step is whole or not there, whatever the store does and whenever a process is killed."""

import json
import shutil
from dataclasses import dataclass

import jax
import pytest
from checkpoint_runs import config, numbered, opened, program, restored, same

from meshtrain import reader, stores
from meshtrain.checkpoint.__main__ import main
from meshtrain.checkpoint.saving import CheckpointError
from meshtrain.errors import ConfigError, Unreadable

pytest.importorskip("s3fs", reason="needs the extra remote")
pytest.importorskip("moto", reason="needs moto's server")

from store_server import BUCKET, SERVERS, StoreServer, impatient, store_server


@pytest.fixture(scope="module", params=SERVERS)
def root(request):
    return f"{request.param}://{BUCKET}/run"


@pytest.fixture(scope="module")
def server(root):
    with store_server(root.partition(":")[0]) as server:
        yield server


@pytest.fixture(autouse=True)
def impatience(monkeypatch, server: StoreServer, tmp_path, root):
    with impatient(monkeypatch, server, tmp_path / "cache", root, 5.0):
        yield


@dataclass(frozen=True)
class Stored:
    """The checkpoints of runs at an address."""

    root: str

    def settings(self, directory, layout="one device", **checkpoint):
        given = {"directory": self.root, "keep": 2, "keep_best": 0, **checkpoint}
        return config(directory, layout, checkpoint=given)

    def save(self, directory, numbers, **checkpoint):
        with opened(self.settings(directory, **checkpoint), program()) as (
            checkpointer,
            said,
        ):
            checkpointer.restore_or_init()
            for step in numbers:
                checkpointer.save(step, numbered(program(), step), loss=1.0)
            checkpointer.wait()
        return said

    def there(self):
        """The steps that the store has, each with whether it is committed."""
        names = stores.listing(self.root)
        return {
            n.split("/")[0]: f"{n.split('/')[0]}/COMMIT" in names
            for n in names
            if "/" in n
        }


@pytest.fixture
def stored(root):
    return Stored(root)


def test_steps_go_to_the_store_and_come_back_without_the_run_directory(
    stored: Stored, tmp_path
):
    stored.save(tmp_path / "run", [1, 2, 3])
    assert stored.there() == {"2": True, "3": True}
    assert not list((tmp_path / "run").rglob("arrays"))
    state, step, _ = restored(stored.settings(tmp_path / "run"), program())
    assert step == 3 and same(state, numbered(program(), 3))
    shutil.rmtree(tmp_path / "run")
    state, step, _ = restored(stored.settings(tmp_path / "run"), program())
    assert step == 3 and same(state, numbered(program(), 3))


def test_the_commit_is_written_last_and_removed_first(
    stored: Stored, tmp_path, server: StoreServer
):
    stored.save(tmp_path / "run", [1, 2])
    server.asked.clear()
    stored.save(tmp_path / "run", [3])
    paths = [path for method, path in server.asked if method == "PUT" and "/3/" in path]
    assert (
        paths[-1].endswith("/3/COMMIT") and sum("COMMIT" in path for path in paths) == 1
    )
    removed = [
        path for method, path in server.asked if method == "DELETE" and "/1/" in path
    ]
    assert removed[0].endswith("/1/COMMIT") and len(removed) > 3


@pytest.mark.parametrize("fault", ["busy", "cut"])
def test_faults_that_pass_cost_nothing(
    stored: Stored, tmp_path, server: StoreServer, fault
):
    server.fail(2, fault, "", "/1/")
    stored.save(tmp_path / "run", [1])
    server.fail(2, fault, "GET", "/1/arrays")
    state, step, _ = restored(stored.settings(tmp_path / "run"), program())
    assert step == 1 and same(state, numbered(program(), 1))


@pytest.mark.parametrize(
    "part, fault",
    [
        ("/2/arrays", "expired"),
        ("/2/COMMIT", "busy"),
        pytest.param("/2/arrays", "busy", marks=pytest.mark.thorough),
        pytest.param("/2/manifest.json", "busy", marks=pytest.mark.thorough),
        pytest.param("/2/COMMIT", "expired", marks=pytest.mark.thorough),
    ],
)
def test_a_save_that_fails_leaves_the_step_before(
    stored: Stored, tmp_path, server: StoreServer, part, fault
):
    stored.save(tmp_path / "run", [1])
    server.fail(10**6, fault, "PUT", part)
    reason = "token has expired" if fault == "expired" else "reduce your request rate"
    with pytest.raises(CheckpointError, match=f"{reason}.*; step 1 is intact"):
        stored.save(tmp_path / "run", [2])
    assert not stored.there().get("2")
    server.fault = lambda method, path: None
    with opened(stored.settings(tmp_path / "run"), program()) as (checkpointer, _):
        state, step = checkpointer.restore_or_init()
        assert step == 1 and same(state, numbered(program(), 1))
        assert stored.there() == {"1": True}  # what the save left is gone
        checkpointer.save(2, numbered(program(), 2), loss=1.0)
        checkpointer.wait()
    assert stored.there() == {"1": True, "2": True}


def test_a_store_that_does_not_answer_is_no_finding_about_a_step(
    stored: Stored, tmp_path, server: StoreServer
):
    stored.save(tmp_path / "run", [1, 2])
    server.fail(10**6, "busy", "GET", "/2/arrays")
    with pytest.raises(Unreadable, match="cannot be read now"):
        restored(stored.settings(tmp_path / "run"), program())
    server.fault = lambda method, path: None
    assert restored(stored.settings(tmp_path / "run"), program())[1] == 2


def test_a_damaged_step_is_passed_over_and_written_anew(stored: Stored, tmp_path):
    stored.save(tmp_path / "run", [1, 2])
    name = max(
        (n for n in stores.listing(stored.root) if n.startswith("2/arrays")), key=len
    )
    content = stores.read(f"{stored.root}/{name}")
    stores.write(f"{stored.root}/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["verify", stored.root, "--step", "2"]) == 1
    _, step, said = restored(stored.settings(tmp_path / "run"), program())
    assert step == 1 and "2 is damaged" in said[0]
    stored.save(tmp_path / "run", [2])
    assert restored(stored.settings(tmp_path / "run"), program())[1] == 2


def test_an_object_that_is_missing_or_short_is_damage(stored: Stored, tmp_path):
    stored.save(tmp_path / "run", [1, 2])
    name = max(
        (n for n in stores.listing(stored.root) if n.startswith("2/arrays")), key=len
    )
    stores.write(f"{stored.root}/{name}", stores.read(f"{stored.root}/{name}")[:-1])
    _, step, said = restored(stored.settings(tmp_path / "run"), program())
    assert step == 1 and "bytes instead of" in said[0]


def test_two_runs_do_not_share_an_address(stored: Stored, tmp_path):
    stored.save(tmp_path / "run", [1])
    with pytest.raises(
        ConfigError, match=r"has the checkpoints of the run in .*/run; give another"
    ):
        restored(stored.settings(tmp_path / "other"), program())
    with pytest.raises(ConfigError, match="a store cannot set aside"):
        restored(stored.settings(tmp_path / "run", resume="never"), program())


def test_another_run_starts_from_an_address(stored: Stored, tmp_path):
    stored.save(tmp_path / "run", [1, 2])
    for address in (stored.root, f"{stored.root}/2"):
        other = config(
            tmp_path / f"other{len(address)}", checkpoint={"resume": address}
        )
        state, step, _ = restored(other, program())
        assert step == 2 and same(state, numbered(program(), 2))


def test_a_step_is_restored_onto_another_mesh(stored: Stored, tmp_path):
    stored.save(tmp_path / "run", [1])
    state, step, _ = restored(
        stored.settings(tmp_path / "run", "tensor 2, pipeline 2, V")
    )
    assert step == 1
    assert len(jax.tree.leaves(state.params)[0].sharding.device_set) == 4


def test_the_command_looks_at_a_store_beside_a_writer(stored: Stored, tmp_path, capsys):
    stored.save(tmp_path / "run", [1, 2])
    assert main(["ls", stored.root, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["step"] for entry in entries] == [1, 2]
    assert main(["show", f"{stored.root}/2"]) == 0
    assert capsys.readouterr().out.startswith("step 2 in")
    assert main(["verify", stored.root]) == 0
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert not list(tmp_path.rglob("arrays"))  # nothing was kept
    stores.remove([f"{stored.root}/1/COMMIT"])  # a removal is under way
    capsys.readouterr()
    assert main(["ls", stored.root, "--json"]) == 0
    assert [entry["step"] for entry in json.loads(capsys.readouterr().out)] == [2]
    assert main(["diff", f"{stored.root}/2", stored.root]) == 0


def test_a_model_is_read_from_an_address_and_from_its_run(stored: Stored, tmp_path):
    stored.save(tmp_path / "run", [1])
    for path in (stored.root, f"{stored.root}/1", tmp_path / "run"):
        model = reader.read_model(path)
        assert model.step == 1
    assert not list((tmp_path / "run").rglob("arrays"))

import json
import random
import re
import time

import pytest
from synthetic_history import Synthetic

from meshtrain.config import ConfigError
from meshtrain.survive import stats
from meshtrain.survive.__main__ import main
from meshtrain.survive.history import read

NODE = {
    "sequence": 7,
    "incarnation": "a",
    "host": "machine",
    "state": "running",
    "generation": 3,
    "acked": 3,
    "leaving": False,
    "end": None,
}
RANK = {
    "number": 1,
    "pid": 5,
    "proc": "S",
    "phase_age": 0.4,
    "alive_age": 0.1,
    "step": 120,
    "phase": "wait",
    "pace": 1.25,
    "phases": {"data": 25.0, "wait": 75.0},
    "saved": 110,
    "start": 100,
}
PLAN = {
    "number": 5,
    "generation": 3,
    "state": "running",
    "leader": "n0",
    "wall": 1000.0,
    "members": ["n0", "n1"],
    "coordinator": "machine:1234",
    "mesh": {"data": 2, "tensor": 4, "pipeline": 1},
    "microbatches": 8,
    "kind": "signal",
    "reason": "rank 2 was killed",
    "verdict": "run",
    "blamed": ["n2"],
    "quarantined": {"n2": 4600.0},
}


@pytest.fixture
def going(tmp_path):
    """A run of two nodes, a spare, and one that is left out."""
    at = tmp_path / "survive"
    (at / "plans").mkdir(parents=True)
    (at / "nodes").mkdir()
    (at / "plans" / "000004.json").write_text(
        json.dumps(PLAN | {"number": 4, "state": "forming", "wall": 998.0})
    )
    (at / "plans" / "000005.json").write_text(json.dumps(PLAN))
    for name, more in (
        ("n0", {"rank": RANK | {"number": 0}}),
        ("n1", {"rank": RANK}),
        ("n3", {"state": "idle", "rank": None}),
    ):
        write(at, name, NODE | {"wall": 1002.0} | more)
    return tmp_path


def write(at, name, record):
    (at / "nodes" / f"{name}.json").write_text(
        json.dumps({"name": name} | record).ljust(4096)
    )


def row(text, name):
    return next(line for line in text.splitlines() if line.startswith(name + " "))


def test_status_says_what_goes_on(going):
    text = stats.show_status(going, watch=0.0)
    assert text.startswith(
        "generation 3 running: rank 2 was killed\nmesh data 2 x tensor 4 x pipeline 1, 8 microbatches\n"
    )
    assert "leader n0; coordinator machine:1234; spare n3" in text
    assert "n2 is left out for another 59 min 58 s" in text
    assert (
        row(text, "n1").split("  ")[0] == "n1"
        and "120" in row(text, "n1")
        and "wait for 400 ms" in row(text, "n1")
    )
    assert "1.25 s" in row(text, "n1") and " 25% " in row(text, "n1")
    assert "00:16:38  generation 3 forming: rank 2 was killed (blamed: n2)" in text


def test_a_program_gets_the_newest_decision_and_every_node(going):
    status = stats.status_json(going, watch=0.0)
    assert (status["over"], status["decision"]["generation"], status["torn"]) == (
        False,
        3,
        0,
    )
    assert [(node["name"], node["alive"]) for node in status["nodes"]] == [
        ("n0", False),
        ("n1", False),
        ("n3", False),
    ]
    assert (
        status["nodes"][1]["rank"]["step"] == 120 and status["nodes"][2]["rank"] is None
    )


def test_who_writes_lives_and_who_does_not_is_told_of_with_its_last_word(going):
    def goes_on(seconds):
        write(
            going / "survive", "n1", NODE | {"wall": 1e6, "sequence": 8, "rank": RANK}
        )
        time.sleep(0.02)

    text = stats.show_status(going, watch=0.1, sleep=goes_on)
    assert row(text, "n1").endswith("  now")
    assert re.search(
        r"none in \d+ ms; the last says 1970-01-01 00:16:42 UTC$", row(text, "n0")
    )
    sequence = iter(range(9, 100))

    def all_write(seconds):
        for name in ("n0", "n1", "n3"):
            write(
                going / "survive",
                name,
                NODE | {"wall": 1e3, "sequence": next(sequence)},
            )

    began = time.monotonic()
    stats.show_status(going, watch=30.0, sleep=all_write)
    assert time.monotonic() - began < 5, "watching ends once all have written"


def test_a_process_that_ended_says_how(going):
    end = {
        "exit": -9,
        "kind": "signal",
        "sentence": "killed by signal 9",
        "step": 120,
        "ranks": [],
    }
    write(
        going / "survive",
        "n1",
        NODE | {"wall": 1002.0, "state": "ended", "rank": RANK, "end": end},
    )
    assert "ended: killed by signal 9" in row(stats.show_status(going, watch=0.0), "n1")


def test_a_finished_run_is_not_waited_for(tmp_path, capsys):
    made = Synthetic(random.Random(1), nodes=3, faults=2).play().write(tmp_path)

    def never(seconds):
        raise AssertionError("it was watched")

    text = stats.show_status(made, sleep=never)
    assert text.startswith("over, exit code 0: ")
    assert "lately" in text and "forming" in text
    assert main(["status", str(made), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["over"] is True


def test_a_directory_that_is_no_run_is_a_sentence(tmp_path):
    with pytest.raises(
        ConfigError, match=rf"{tmp_path} is not a run .* no directory survive/\.$"
    ):
        stats.show_status(tmp_path)
    with pytest.raises(ConfigError, match=r"^there is no run directory .*nowhere\.$"):
        stats.show_status(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no run directory"):
        stats.show_status(tmp_path / ("x" * 300))


def test_before_anything_is_decided(tmp_path):
    (tmp_path / "survive").mkdir()
    assert stats.show_status(tmp_path) == "waiting for nodes: nothing is decided yet\n"


def test_what_is_cut_or_strange_is_left_out_and_counted(going):
    at = going / "survive"
    (at / "events.n0.jsonl").write_bytes(
        b'{"wall": 1000.5, "event": "join"}\n{"wall": 1001.0, "eve\n[1]\n{"wall": NaN, "event": "join"}\n{"wall": '
        b'1e999, "event": "x"}\n'
        + b'{"wall": 1001.5, "event": "of a version to come", "generation": {}}\n'
        + b"[" * 100_000
        + b'\n\xff\xfe\n{"wall": 1'
    )
    (at / "nodes" / "n1.json").write_bytes(b'{"sequence": 3, "ra')
    (at / "plans" / "000009.json").write_bytes(b"")
    (at / "nodes" / "..x.json").write_text(json.dumps(NODE))
    (at / "nodes" / "n9.json").symlink_to("n0.json")
    (at / "events.a b.jsonl").write_text("{}\n")
    found = read(going)
    assert [event.name for event in found.events] == ["join", "of a version to come"]
    assert set(found.records) == {"n0", "n3"}
    # 6 lines (a last one without an end may still be written), a record, a plan, a link
    assert found.torn == 9
    assert "9 torn lines were left out" in stats.show_status(going, watch=0.0)


def test_a_record_of_wrong_types_is_no_traceback_and_words_cannot_move_the_cursor(
    going,
):
    at = going / "survive"
    escape = {"host": "\x1b[2J\nfake", "rank": RANK | {"phase": "\x1b[2J"}}
    write(at, "n1", NODE | {"wall": 1002.0} | escape)
    text = stats.show_status(going, watch=0.0)
    assert "\x1b" not in text and "\\x1b[2J\\nfake" in text
    for value in (None, 3, "x", [], {}, {"a": {}}):
        write(at, "n1", dict.fromkeys((*NODE, "wall", "rank"), value))
        plan = dict.fromkeys(PLAN, value) | {
            "number": 7,
            "generation": 3,
            "wall": 1003.0,
        }
        (at / "plans" / "000007.json").write_text(json.dumps(plan))
        assert "n1" in stats.show_status(going, watch=0.0)

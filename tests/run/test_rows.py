import json

from meshtrain.run.rows import trim_metrics


def write(path, steps, tail=b""):
    path.write_bytes(b"".join(json.dumps({"step": s, "loss": 1.0}).encode() + b"\n" for s in steps) + tail)


def read(path):
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


def test_rows_after_the_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 9))
    trim_metrics(path, 5)
    assert read(path) == [1, 2, 3, 4, 5]


def test_a_torn_last_row_is_dropped_even_if_its_step_counts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for tail in (b'{"step": 3, "lo', b'{"step": 3}', b'{"step": 3, "x"}\n', b"\x00\x00\n"):
        write(path, [1, 2], tail)
        trim_metrics(path, 9)
        assert read(path) == [1, 2]
        assert path.read_bytes().endswith(b"\n")


def test_nothing_is_rewritten_when_nothing_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    before = path.stat().st_ino
    trim_metrics(path, 2)
    assert path.stat().st_ino == before


def test_no_file_is_no_error(tmp_path):
    trim_metrics(tmp_path / "metrics.jsonl", 0)
    assert not any(tmp_path.iterdir())

import json
import math

import numpy as np
import pytest

from meshtrain.report.rows import Columns, read


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_column_is_as_long_as_there_are_rows_and_unknown_where_a_row_says_nothing(
    path,
):
    path.write_bytes(
        lines({"step": 1}, {"step": 2, "loss": 2.5}, {"step": 3, "loss": None})
    )
    columns, torn = read(path)
    assert torn == 0
    np.testing.assert_array_equal(columns["step"], [1, 2, 3])
    np.testing.assert_array_equal(columns["loss"], [math.nan, 2.5, math.nan])
    np.testing.assert_array_equal(columns["never"], [math.nan] * 3)
    assert columns.known("loss").tolist() == [2.5] and columns.known("never").size == 0


def test_labels_are_columns_of_their_own(path):
    path.write_bytes(
        lines(
            {"phase_seconds": {"data": 0.5, "wait": 2}},
            {"device_throttled": {"0": {"heat": 1}}},
        )
    )
    columns, _ = read(path)
    assert columns.known("phase_seconds.wait").tolist() == [2.0]
    assert columns.names("device_throttled.") == ["device_throttled.0.heat"]


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"[1]\n",
        b"\xff\n",
        b'{"a": NaN\n',
        b"[" * 100_000 + b"\n",
        b'{"a": ' + b"9" * 5000 + b"}\n",
    ],
)
def test_what_is_no_row_is_left_out_and_counted(path, bad):
    path.write_bytes(
        lines({"step": 1})
        + bad
        + (b"" if bad.endswith(b"\n") else b"\n")
        + lines({"step": 2})
    )
    columns, torn = read(path)
    assert columns.known("step").tolist() == [1, 2] and torn == 1


def test_values_that_are_no_numbers_are_unknown(path):
    path.write_bytes(
        lines({"a": "1", "b": True, "c": [1], "d": 1e400, "e": 1})
        + b'{"e": 1'
        + b"0" * 400
        + b"}\n"
    )
    columns, _ = read(path)
    assert [columns.known(name).tolist() for name in "abcde"] == [[], [], [], [], [1.0]]


def test_a_loss_that_was_not_finite_is_counted(path):
    path.write_bytes(
        lines(
            {"step": 1, "loss": None, "not_finite": ["loss"]},
            {"step": 2, "not_finite": [3, {}]},
        )
    )
    assert read(path)[0].not_finite == {"loss": 1}


def test_names_without_end_are_not_all_kept():
    columns = Columns()
    columns.add({f"k{i}": 1.0 for i in range(2000)})
    assert len(columns.names()) == 512

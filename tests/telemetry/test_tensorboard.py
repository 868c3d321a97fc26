"""TensorBoard's event files: read back by a parser of the format, and by TensorBoard itself where it is installed."""

import math
import struct

import pytest

from meshtrain.telemetry.trackers import EventFile, masked_crc

ROWS = [
    (1, {"loss": 5.62396, "time": 1795361828.7236662, "tokens": 2048}),
    (2, {"loss": math.nan, "grad_norm": 1e300, "time": 1795361829.5}),
    (2**40, {"loss": -0.5, "time": 1795361830.25}),
]


def as_float32(value):
    return (
        struct.unpack("<f", struct.pack("<f", value))[0]
        if abs(value) < 1e38 or value != value
        else math.inf
    )


def records(content):
    """The messages of a TFRecord file; fails on a wrong CRC."""
    while content:
        length, crc = struct.unpack("<QI", content[:12])
        message = content[12 : 12 + length]
        assert crc == masked_crc(content[:8])
        assert struct.unpack("<I", content[12 + length : 16 + length]) == (
            masked_crc(message),
        )
        yield message
        content = content[16 + length :]


def fields(message):
    """(field, value) of a protobuf message; numbers as they lie there."""
    at = 0

    def varint():
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, message[at : at + size]
        at += size


def written(directory):
    file = EventFile(directory)
    for step, values in ROWS:
        file.row(step, values)
    file.close()
    (path,) = directory.iterdir()
    return path


def test_the_crc_is_that_of_its_standard():
    """RFC 3720, B.4: CRC-32C of 32 zeros is 0x8a9136aa, of 32 ones 0x62a8ab43."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)):
        assert (
            masked_crc(data)
            == ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32
        )


def test_every_number_is_read_back_as_float32_at_its_step_and_time(tmp_path):
    version, start, *events = [
        dict(fields(message)) for message in records(written(tmp_path).read_bytes())
    ]
    assert (
        version[3] == b"brain.Event:2"
        and dict(fields(start[7])) == {1: 1}
        and start[2] == 1
    )
    assert len(events) == len(ROWS)
    for event, (step, values) in zip(events, ROWS, strict=True):
        assert event[2] == step and struct.unpack("<d", event[1]) == (values["time"],)
        found = [dict(fields(value)) for field, value in fields(event[5]) if field == 1]
        read = {value[1].decode(): struct.unpack("<f", value[2])[0] for value in found}
        assert repr(read) == repr(
            {name: as_float32(value) for name, value in values.items()}
        )


def test_tensorboard_reads_the_same_and_drops_the_steps_that_come_once_more(tmp_path):
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    first = written(tmp_path)
    first.rename(tmp_path / "events.out.tfevents.1.first")
    again = EventFile(tmp_path)
    again.row(2, {"loss": 7.0, "time": 1795361900.0})
    again.close()
    found = accumulators.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (1, as_float32(5.62396)),
        (2, 7.0),
    ]
    assert found.Scalars("loss")[0].wall_time == ROWS[0][1]["time"]

"""TensorBoard's event files, without TensorBoard: length and CRC around each protobuf message, of which we need seven fields.

    uint64 length │ masked CRC-32C of it │ message │ masked CRC-32C of it        TFRecord: tensorflow/core/lib/io/record_writer.h
    Event   1 wall_time (double)  2 step (int64)  3 file_version  5 summary  7 session_log    tensorflow/core/util/event.proto
    Summary.value   1 tag  2 simple_value (float)                                              tensorflow/core/framework/summary.proto

Numbers are float32 there. A run that goes on from an earlier step begins with a session's start, at which TensorBoard drops the steps
that will come once more.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
START = 1  # SessionLog.SessionStatus


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
        found.append(byte)
    return tuple(found)


TABLE = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and shifted so that a CRC of data with CRCs in it stays a good one."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    return length + struct.pack("<I", masked_crc(length)) + message + struct.pack("<I", masked_crc(message))


def _varint(number: int) -> bytes:
    # A negative one counts from 2^64.
    number &= 2**64 - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _text(field: int, content: bytes) -> bytes:
    """A field of bytes, a text or a message within the message."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _event(wall_time: float, step: int, rest: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + rest


class EventFile:
    """A tracker: one event a row, with a value for each number, in a file of this process's own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        # Unbuffered, so that a killed run loses nothing.
        self._file = (directory / name).open("xb", buffering=0)
        self._file.write(record(_event(now, 0, _text(3, b"brain.Event:2"))))
        self._begun = False

    def row(self, step: int, values: Mapping[str, float]) -> None:
        when = values.get("time", time.time())
        written = b"" if self._begun else record(_event(when, step, _text(7, b"\x08" + _varint(START))))
        self._begun = True
        numbers = b"".join(
            _text(1, _text(1, tag.encode()) + b"\x15" + struct.pack("<f", _float32(value)))
            for tag, value in values.items()
        )
        self._file.write(written + record(_event(when, step, _text(5, numbers))))

    def close(self) -> None:
        self._file.close()


def _float32(value: float) -> float:
    """What is too large becomes infinite, as numpy has it; struct would refuse it."""
    return value if abs(value) <= 3.4028235e38 or value != value else float("inf") * (1 if value > 0 else -1)

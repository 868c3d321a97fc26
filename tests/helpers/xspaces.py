"""Traces as JAX's profiler writes them, made by hand: XSpace in protobuf's wire format (xplane.proto), and a directory
as a run leaves it.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshtrain.report.trace.attribution import Attribution
from meshtrain.telemetry.trace import EVENTS, FACTS, MODULE, Facts

Told = tuple[
    str, float, float, Mapping[str, int | str]
]  # name, begin and end in microseconds, stats


def space(planes: Mapping[str, Mapping[str, Sequence[Told]]]) -> bytes:
    """An XSpace of planes of lines of events."""
    return b"".join(_message(1, _plane(name, lines)) for name, lines in planes.items())


def _plane(name: str, lines: Mapping[str, Sequence[Told]]) -> bytes:
    events, stats = _Names(), _Names()
    told = b"".join(
        _message(3, _line(k, line, of_line, events, stats))
        for k, (line, of_line) in enumerate(lines.items())
    )
    known = b"".join(
        _message(
            field,
            _number(1, number)
            + _message(2, _number(1, number) + _message(2, word.encode())),
        )
        for field, names in ((4, events), (5, stats))
        for word, number in names.items()
    )
    return _message(2, name.encode()) + told + known


def _line(
    number: int, name: str, told: Sequence[Told], events: "_Names", stats: "_Names"
) -> bytes:
    content = _number(1, number) + _message(2, name.encode())
    for event, begin, end, values in told:
        one = (
            _number(1, events.of(event))
            + _number(2, round(begin * 1e6))
            + _number(3, round((end - begin) * 1e6))
        )
        for stat, value in values.items():
            held = (
                _number(4, value)
                if isinstance(value, int)
                else _message(5, value.encode())
            )
            one += _message(4, _number(1, stats.of(stat)) + held)
        content += _message(4, one)
    return content


class _Names(dict[str, int]):
    def of(self, name: str) -> int:
        return self.setdefault(name, len(self) + 1)


def _varint(n: int) -> bytes:
    found = bytearray()
    while n > 127:
        found.append(n & 127 | 128)
        n >>= 7
    return bytes([*found, n])


def _number(field: int, n: int) -> bytes:
    return _varint(field << 3) + _varint(n)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


# Partitions are counted data, tensor, pipeline: 4 d + 2 t + p.
HLO = """HloModule jit__train, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inside (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %doubled = f32[8]{0} add(%q, %q), metadata={op_name="jit(_train)/shard_map/forward_slot/jvp(layer)/add"}
}

%command_buffer (r: f32[8]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  ROOT %held = f32[8]{0} fusion(%r), kind=kLoop, calls=%inside, metadata={op_name="jit(_train)/shard_map/forward_slot/jvp(layer)/add"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %forward = f32[8]{0} fusion(%p), kind=kLoop, calls=%inside, metadata={op_name="jit(_train)/shard_map/forward_slot/jvp(layer)/add"}
  %backward = f32[8]{0} fusion(%forward), kind=kLoop, calls=%inside, metadata={op_name="jit(_train)/shard_map/backward_slot/transpose(jvp(layer))/add"}
  %again = f32[8]{0} fusion(%backward), kind=kLoop, calls=%inside, metadata={op_name="jit(_train)/shard_map/backward_slot/transpose(jvp(x))/rematted_computation/layer/add"}
  %head = f32[8]{0} fusion(%again), kind=kLoop, calls=%inside, metadata={op_name="jit(_train)/shard_map/loss_head/add"}
  %reduce-start = f32[8]{0} all-reduce-start(%head), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%add
  %reduce-done = f32[8]{0} all-reduce-done(%reduce-start)
  %gather-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}
  %gather-done = f32[8]{0} all-gather-done(%gather-start)
  %send-start = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p), source_target_pairs={{0,1},{2,3},{4,5},{6,7}}
  %send-done = f32[8]{0} collective-permute-done(%send-start)
  ROOT %called = f32[8]{0} call(%send-done), to_apply=%command_buffer
}
"""
FACTS_OF_GPUS = Facts(
    steps=[5],
    module="jit__train",
    platform="gpu",
    mesh={"data": 2, "tensor": 2, "pipeline": 2},
    devices=list(range(8)),
    local=list(range(8)),
    processes=1,
    masked={},
)


def written(
    directory: Path,
    hlo: str,
    planes: Mapping[str, Mapping[str, Sequence[Told]]],
    facts: Facts = FACTS_OF_GPUS,
) -> Path:
    """A directory as `telemetry.trace` leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / EVENTS).write_bytes(space(planes))
    (directory / MODULE).write_text(hlo)
    (directory / FACTS).write_text(json.dumps(dataclasses.asdict(facts)))
    return directory


def microseconds(told: Attribution) -> dict[str, float]:
    return {kind: round(1e6 * seconds, 6) for kind, seconds in told.seconds.items()}

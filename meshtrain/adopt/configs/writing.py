"""Their files to the text of one of ours: read, merged, followed up, written, and loaded once to see that it is one."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshtrain.adopt.configs.following import follow, found_near
from meshtrain.adopt.configs.merging import Facts, merged
from meshtrain.adopt.configs.reading import DEEPSPEED, read
from meshtrain.adopt.configs.rows import Given
from meshtrain.config import Config, load

WIDTH = 140


def convert(paths: Sequence[str | Path], devices: int | None = None, steps: int | None = None) -> tuple[str, list[str]]:
    """The YAML of our config, comments included; and the sentences that whoever runs it should see at once.

    `devices`: how many it is for, which their files do not say. `steps`: of the run, where theirs is given in epochs and the warm-up as
    a share of it. ConfigError where the files contradict themselves or each other, or ask for what is not here.
    """
    files = [read(path) for path in paths]
    near = Path(paths[0]).absolute().parent
    files, told = _with_deepspeed(files, near)
    facts = merged(files)
    if told:
        facts.said.append(told)
    facts.take("deepspeed file")
    follow(facts, devices, steps, near)
    sections = _sections(facts)
    _check(sections)
    head = " and ".join(f"{keys[0].file} ({kind})" for kind, keys in files)
    ranks = facts.get("mesh.data") * facts.get("mesh.tensor")
    text = f"# From {head}, for {ranks} device{'s' * (ranks > 1)}.\n" + _comments(facts) + _yaml(sections)
    return text, facts.said + [
        f"{given.text} ({given.where}) is left out, which changes what is learned: {why}." for given, why in facts.lost
    ]


def _with_deepspeed(files: list[tuple[str, list[Given]]], near: Path) -> tuple[list[tuple[str, list[Given]]], str]:
    """With the file that the key `deepspeed` names, unless one was given; and what there is to say of it."""
    named = next((given for _, keys in files for given in keys if given.key == "deepspeed" and given.value), None)
    if any(kind == DEEPSPEED for kind, _ in files) or named is None:
        return files, ""
    found = found_near(str(named.value), near)
    if found is None or not found.is_file():
        return files, f"{named.text} ({named.where}) is no file here: give it after this one."
    return [*files, read(found)], ""


def _sections(facts: Facts) -> dict[str, dict[str, Any]]:
    """By section and key, in the order of the schema."""
    given = {path: entry.value for path, entry in facts.found.items()}
    sections: dict[str, dict[str, Any]] = {}
    for section in dataclasses.fields(Config):
        keys = [f.name for f in dataclasses.fields(section.type)]  # type: ignore[arg-type]
        held = {key: given.pop(f"{section.name}.{key}") for key in keys if f"{section.name}.{key}" in given}
        # An empty list says what no list says.
        held = {key: value for key, value in held.items() if value != []}
        if held:
            sections[section.name] = held
    assert not given, f"facts that nobody took: {', '.join(given)}"
    return sections


def _check(sections: Mapping[str, Mapping[str, Any]]) -> None:
    """ConfigError where ours would be refused. What the model's own file says is not asked for where it is not here."""
    weights = sections.get("model", {}).get("weights")
    there = weights is not None and Path(weights).expanduser().is_dir()
    load({name: section for name, section in sections.items() if there or name != "model"})


def _comments(facts: Facts) -> str:
    """What is not as in their files: keys with their values and lines, by the reason."""
    files = {given.file for entries in (facts.lost, facts.differs, facts.left) for given, _ in entries}
    lines = [f"To do: {sentence}" for sentence in facts.said]
    for title, entries in (
        ("Left out, which changes what is learned", facts.lost),
        ("Not quite the same", facts.differs),
        ("Left out", facts.left),
    ):
        by_reason: dict[str, list[str]] = {}
        for given, why in entries:
            where = f"line {given.line}" if len(files) == 1 else f"{Path(given.file).name}, line {given.line}"
            by_reason.setdefault(why, []).append(f"{given.text} ({where})")
        lines += [f"{title}: {', '.join(keys)}: {why}." for why, keys in by_reason.items()]
    return "".join(f"{part}\n" for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, WIDTH, initial_indent="# ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False
    )


def _yaml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a section where it fits, as our own configs have them; else a line a key."""

    def flow(value: Any) -> str:
        return (
            yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=float("inf"))
            .removesuffix("...\n")
            .strip()
        )

    text = ""
    for name, keys in sections.items():
        line = f"{name + ':':<12}{flow(dict(keys))}\n"
        text += line if len(line) <= WIDTH else f"{name}:\n" + "".join(f"  {key}: {flow(keys[key])}\n" for key in keys)
    return text

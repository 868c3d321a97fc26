"""Files of LLaMA-Factory and DeepSpeed to the text of one of our configs: read, merged, followed up, written, and
loaded once as a check.

Several files give one value for each of our keys; two that differ are refused, with both and where they stand.
"""

import dataclasses
import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshtrain.adopt.configs import deepspeed, key_rows, llama_factory
from meshtrain.adopt.configs.following import follow, path_near
from meshtrain.adopt.configs.key_rows import (
    FactValue,
    GivenKey,
    KeyFacts,
    LeftOut,
    RefusedValue,
    Table,
    row_of,
)
from meshtrain.config import Config, load
from meshtrain.config.values import compose, problem
from meshtrain.errors import ConfigError, short
from meshtrain.files import read_text

LLAMA_FACTORY = "LLaMA-Factory"
DEEPSPEED = "DeepSpeed"
TABLES: dict[str, Table] = {
    LLAMA_FACTORY: llama_factory.TABLE,
    DEEPSPEED: deepspeed.TABLE,
}
Files = list[tuple[str, list[GivenKey]]]  # the program that each is for, and its keys
MOST_BYTES = 256 * 1024
# Likeness from which on an unknown key is taken for another one's misspelling
MISSPELT = 0.85
WIDTH = 140
AUTO = "auto"  # DeepSpeed: as the trainer's arguments have it


def convert(
    paths: Sequence[str | Path], devices: int | None = None, steps: int | None = None
) -> tuple[str, list[str]]:
    """Returns the YAML of our config, comments included; and the sentences that whoever runs it should see at once.

    `devices`: how many it is for, which their files do not say. `steps`: of the run, where theirs is given in epochs
    and the warm-up as a share of it. ConfigError where the files contradict themselves or each other, or ask for what
    is not here.
    """
    files = [_read(path) for path in paths]
    near = Path(paths[0]).absolute().parent
    notes = _add_deepspeed_file(files, near)
    facts = _merge(files)
    facts.notes += notes
    facts.take("deepspeed file")
    follow(facts, devices, steps, near)
    sections = _sections(facts)
    weights = sections.get("model", {}).get("weights")
    without = () if weights and Path(weights).expanduser().is_dir() else ("model",)
    load({name: section for name, section in sections.items() if name not in without})
    names = " and ".join(f"{keys[0].file} ({kind})" for kind, keys in files)
    ranks = facts.get("mesh.data") * facts.get("mesh.tensor")
    text = (
        f"# From {names}, for {ranks} device{'s' * (ranks > 1)}.\n"
        + _comments(facts)
        + _yaml(sections)
    )
    return text, facts.notes + [
        f"{given.text} ({given.where}) {how}, which changes what is learned: {why}."
        for entries, how in (
            (facts.lost, "is left out"),
            (facts.differs, "is not quite the same here"),
        )
        for given, why in entries
    ]


# --- read


def _read(path: str | Path) -> tuple[str, list[GivenKey]]:
    """Returns the program that a file is for, and its keys in their order; ConfigError if it is for none that we
    know.
    """
    name = short(path)
    is_json = str(path).endswith(".json")
    takes = "a YAML file of LLaMA-Factory, or a JSON file of DeepSpeed"
    content = read_text(
        path,
        "config file",
        f"this command takes {takes}",
        (".yaml", ".yml", ".json"),
        MOST_BYTES,
    )
    try:
        if is_json:
            json.loads(content)
        # No text in JSON holds a bare tab, so those that there are stand between its words, where YAML takes none.
        root = compose(content.replace("\t", " ") if is_json else content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}, line {error.lineno} is not valid JSON: {error.msg.lower()}."
        ) from None
    except yaml.YAMLError as error:
        line, reason = problem(error)
        raise ConfigError(
            f"{name}{f', line {line}' if line else ''} is not valid YAML: {reason}."
        ) from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name} holds no keys with values; give {takes}.")
    keys = list(_keys(root, "", name))
    known = {
        kind: sum(row_of(table, given.key) is not None for given in keys)
        for kind, table in TABLES.items()
    }
    # Where keys that both have leave it open, the name decides.
    usual = DEEPSPEED if is_json else LLAMA_FACTORY
    kind = max(known, key=lambda kind: (known[kind], kind == usual))
    if not known[kind]:
        ours = (
            ", as our own configs do"
            if any(given.key.startswith(("model.", "train.")) for given in keys)
            else ""
        )
        raise ConfigError(
            f"{name} has no key of LLaMA-Factory or of DeepSpeed{ours}; give {takes}."
        )
    return kind, keys


def _keys(node: yaml.MappingNode, prefix: str, name: str) -> Iterator[GivenKey]:
    """Yields the keys of a mapping and of those in it; ConfigError for one that stands there twice."""
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(
                f"{name}: {key} stands there twice, in lines {lines[key]} and {line}."
            )
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _keys(value_node, f"{key}.", name)
        else:
            yield GivenKey(key, _value(value_node), name, line)


def _value(node: yaml.Node) -> Any:
    """Returns a text, number, switch, null or list; 1e-4 is a number here, which YAML takes for a text."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(value) for key, value in node.value}
    kind = node.tag.rpartition(":")[2]
    written = str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return written.lower() in ("true", "yes", "on")
    if getattr(node, "style", None) is None:
        for convert in (int, float):
            try:
                return convert(written)
            except ValueError:
                continue
    return written


def _add_deepspeed_file(files: Files, near: Path) -> list[str]:
    """Adds the file that the key `deepspeed` names, unless one was given; returns a note where it is not here."""
    named = next(
        (
            given
            for _, keys in files
            for given in keys
            if given.key == "deepspeed" and given.value
        ),
        None,
    )
    if named is not None and all(kind != DEEPSPEED for kind, _ in files):
        path = path_near(str(named.value), near)
        if path is None or not path.is_file():
            return [
                f"{named.text} ({named.where}) is not a file here: give it after this one."
            ]
        files.append(_read(path))
    return []


# --- merged


def _merge(files: Files) -> KeyFacts:
    facts = KeyFacts()
    kinds = {kind for kind, _ in files}
    for kind, keys in files:
        facts.keys |= {given.key: given for given in keys}
        for given in keys:
            _add(facts, kind, given, kinds)
    # DeepSpeed has defaults in the sections that a file has; the rest it leaves to the trainer.
    for kind in filter(kinds.__contains__, (DEEPSPEED, LLAMA_FACTORY)):
        own = {
            given.key for program, keys in files if program == kind for given in keys
        }
        sections = {key.partition(".")[0] for key in own if "." in key}
        outer = kind == LLAMA_FACTORY or LLAMA_FACTORY not in kinds
        for key, row in TABLES[kind].items():
            asked = key.partition(".")[0] in sections if "." in key else outer
            if (
                row.default is not None
                and row.becomes is not None
                and key not in own
                and asked
            ):
                for path, value in row.becomes(row.default).items():
                    facts.values.setdefault(path, FactValue(value))
    return facts


def _add(facts: KeyFacts, kind: str, given: GivenKey, kinds: set[str]) -> None:
    row = row_of(TABLES[kind], given.key)
    if row is None:
        _add_unknown(facts, kind, given)
    elif given.value == AUTO and kind != LLAMA_FACTORY:
        absent = "the trainer's file, which is not here, would say it"
        facts.left.append(
            (
                given,
                "as the trainer's file has it" if LLAMA_FACTORY in kinds else absent,
            )
        )
    elif row.becomes is None:
        facts.left.append((given, row.why))
    else:
        try:
            values = dict(row.becomes(given.value))
        except LeftOut as reason:
            (facts.lost if reason.matters else facts.left).append((given, str(reason)))
            return
        except RefusedValue as refused:
            raise given.refused(str(refused)) from None
        differs = values.pop(key_rows.DIFFERS, row.differs if values else "")
        for path, value in values.items():
            facts.add(path, value, given)
        if differs:
            facts.differs.append((given, differs))


def _add_unknown(facts: KeyFacts, kind: str, given: GivenKey) -> None:
    """Leaves out a key that no table has, with a note unless it is like one that changes nothing; ConfigError where it
    is a misspelt one that would be taken over.
    """
    table = TABLES[kind]
    names = [name for name in table if not name.endswith(".")]
    alike = difflib.get_close_matches(given.key, names, n=1, cutoff=MISSPELT)
    if alike and not table[alike[0]].why:
        raise ConfigError(
            f"{given.where}: {kind} has no key {short(given.key)}; did you mean {alike[0]}?"
        )
    near = f" (like {alike[0]}, which is left out too)" if alike else ""
    why = f"no key of {kind}'s that is known here{near}"
    facts.left.append((given, why))
    if not alike or table[alike[0]].becomes is not None:
        facts.notes.append(
            f"{given.text} ({given.where}): {why}; if it changes what is learned, that is lost."
        )


# --- written


def _sections(facts: KeyFacts) -> dict[str, dict[str, Any]]:
    values = {path: entry.value for path, entry in facts.values.items()}
    sections: dict[str, dict[str, Any]] = {}
    for section in dataclasses.fields(Config):
        names = [f.name for f in dataclasses.fields(section.type)]  # type: ignore[arg-type]
        keys = {
            name: values.pop(f"{section.name}.{name}")
            for name in names
            if f"{section.name}.{name}" in values
        }
        # An empty list says what no list says.
        if keys := {name: value for name, value in keys.items() if value != []}:
            sections[section.name] = keys
    assert not values, f"facts that nobody took: {', '.join(values)}"
    return sections


def _comments(facts: KeyFacts) -> str:
    """Returns comments on what is not as in their files: keys with their values and lines, by the reason."""
    titles = {
        "Left out, which changes what is learned": facts.lost,
        "Not quite the same": facts.differs,
        "Left out": facts.left,
    }
    files = {given.file for entries in titles.values() for given, _ in entries}
    lines = [f"To do: {sentence}" for sentence in facts.notes]
    for title, entries in titles.items():
        by_reason: dict[str, list[str]] = {}
        for given, why in entries:
            where = (
                f"line {given.line}"
                if len(files) == 1
                else f"{Path(given.file).name}, line {given.line}"
            )
            by_reason.setdefault(why, []).append(f"{given.text} ({where})")
        lines += [
            f"{title}: {', '.join(keys)}: {why}." for why, keys in by_reason.items()
        ]
    indents: dict[str, Any] = {"initial_indent": "# ", "subsequent_indent": "#   "}
    wrapper = textwrap.TextWrapper(
        WIDTH, **indents, break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{part}\n" for line in lines for part in wrapper.wrap(line))


def _yaml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a line a section where it fits, as our own configs have them; else a line a key."""

    def flow(value: Any) -> str:
        dumped = yaml.safe_dump(
            value, default_flow_style=True, sort_keys=False, width=float("inf")
        )
        return dumped.removesuffix("...\n").strip()

    text = ""
    for name, keys in sections.items():
        line = f"{name + ':':<12}{flow(dict(keys))}\n"
        text += (
            line
            if len(line) <= WIDTH
            else f"{name}:\n" + "".join(f"  {key}: {flow(keys[key])}\n" for key in keys)
        )
    return text

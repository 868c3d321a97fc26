"""YAML text to a tree of nodes whose types nobody has guessed yet: no tags, and nothing deeper than a config can be."""

from typing import Any

import yaml

from meshtrain.errors import short

NULL, BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
DEEPEST = 8  # a config is 4 deep: section, key, list, entry


class _Composer(yaml.SafeLoader):
    """Aliases stand for the node they name, which is not copied: a short text cannot grow."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.composer.ComposerError(None, None, f"there is a tag, {event.tag}", event.start_mark)
        if self.depth == DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"it is nested more than {DEEPEST} deep", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def compose(text: str) -> yaml.Node | None:
    """The root of a YAML text, None if it holds nothing. Raises yaml.YAMLError; see `problem`."""
    return yaml.compose(text, Loader=_Composer)


def problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    """The line, where it is known, and the reason for which a text is not valid YAML."""
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark else None, short(getattr(error, "problem", None) or str(error).splitlines()[0])


def plain(text: str) -> yaml.ScalarNode:
    """A scalar as it would stand in a file without quotes, whatever is in it."""
    return yaml.ScalarNode(yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (True, False)), text)


def shape(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return "a mapping" if isinstance(node, yaml.MappingNode) else f"the single value {short(repr(node.value))}"

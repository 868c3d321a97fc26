"""YAML as an engine takes it: keys in the order given, scripts as lines."""

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as lines."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def dumped(*documents: object) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=2**16)

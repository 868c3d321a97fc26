import json

import pytest
import yaml

from meshtrain.adopt.configs import convert


@pytest.fixture
def write(tmp_path):
    """A function (keys of LLaMA-Factory, or a text) -> the YAML file; of DeepSpeed's with json=True."""

    def written(keys, name="", as_json=False):
        path = tmp_path / (name or ("ds.json" if as_json else "lf.yaml"))
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (
            keys
            if isinstance(keys, str)
            else json.dumps(keys, indent=2)
            if as_json
            else yaml.safe_dump(keys)
        )
        path.write_text(text)
        return path

    return written


@pytest.fixture
def converted(write):
    """A function (LLaMA-Factory's keys, DeepSpeed's, devices, steps) -> our sections, the text, what is said."""

    def run(lf=None, ds=None, devices=8, steps=None):
        paths = [
            write(keys, as_json=kind)
            for keys, kind in ((lf, False), (ds, True))
            if keys is not None
        ]
        text, said = convert(paths, devices, steps)
        return yaml.safe_load(text), text, said

    return run

"""The one place that judges a step: whatever a manifest or the digests say, the answer is a manifest or a sentence."""

import json
import shutil

import numpy as np
import pytest
from checkpoint_runs import program, saved

from meshtrain.checkpoint import digests, steps
from meshtrain.checkpoint.global_arrays import GlobalArrays
from meshtrain.checkpoint.manifest import StepManifest

LEAF = "params.head.weight"
SHAPES = None, 24, "24", [24, -1], [24, "257"], [24, 257.0], [2**63], [2**62] * 30
DTYPES = None, 32, "", "floaty", "object", "f4,f4", "(2,)f4", ["f4"], "\ud800", "\0"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("run"), steps=1)


@pytest.fixture
def step(run, tmp_path):
    return shutil.copytree(run / "checkpoints" / "1", tmp_path / "1")


def vouch(step):
    """Writes digests and marker anew: what is wrong with the manifest is all that there is to find."""
    digests.write(step)
    steps.commit(step)


@pytest.mark.parametrize(
    "name, is_good", [("1", True), ("best", True), ("01", False), ("40", False)]
)
def test_a_number_must_be_the_steps_own_and_any_other_name_may_stand(
    name, is_good, step
):
    renamed = step.rename(step.with_name(name))
    if is_good:
        assert StepManifest.read(renamed).step == 1
    else:
        with pytest.raises(steps.Damaged, match=r"^it is step 1, renamed$"):
            StepManifest.read(renamed)


@pytest.mark.parametrize(
    "key, value",
    [
        *((("step",), value) for value in (None, "1", 1.0, -1, 2**63, True, [])),
        *(
            ((key,), value)
            for key in ("loss", "eval_loss")
            for value in ("low", [], {}, True)
        ),
        (("saved",), 7),
        *((("data",), value) for value in (None, {}, {"batches": "many"})),
        *((("rng",), value) for value in (None, {}, {"seed": 1.5})),
        *(
            ((key,), value)
            for key in ("leaves", "config", "versions")
            for value in (None, [], {"a": 7})
        ),
        *((("leaves", LEAF, "shape"), value) for value in SHAPES),
        *((("leaves", LEAF, "dtype"), value) for value in DTYPES),
    ],
)
def test_what_is_no_value_of_its_key_is_named(key, value, step):
    content = json.loads((step / steps.MANIFEST).read_text())
    place = content
    for name in key[:-1]:
        place = place[name]
    place[key[-1]] = value
    (step / steps.MANIFEST).write_text(json.dumps(content))
    vouch(step)
    with pytest.raises(steps.Damaged, match=rf"^manifest\.json has no legal {key[0]}$"):
        StepManifest.read(step)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b"7", b"null", b"{}", b"[" * 100_000, b"9" * 5000],
)
def test_what_is_no_manifest_at_all_is_named(content, step):
    (step / steps.MANIFEST).write_bytes(content)
    vouch(step)
    with pytest.raises(steps.Damaged, match=r"^manifest\.json "):
        StepManifest.read(step)


def test_a_missing_key_is_named_and_one_of_a_later_version_is_passed_over(step):
    content = json.loads((step / steps.MANIFEST).read_text())
    (step / steps.MANIFEST).write_text(json.dumps(content | {"of a later version": 1}))
    vouch(step)
    assert StepManifest.read(step).step == 1
    del content["eval_loss"]
    (step / steps.MANIFEST).write_text(json.dumps(content))
    vouch(step)
    with pytest.raises(steps.Damaged, match=r"^manifest\.json .* eval_loss$"):
        StepManifest.read(step)


def test_a_loss_of_another_type_is_saved_as_a_number(step):
    for loss in (7, np.float32(7)):
        manifest = StepManifest.make(
            1, loss, None, program().config, GlobalArrays(program()).records, {}, {}
        )
        manifest.write(step)
        vouch(step)
        assert StepManifest.read(step).loss == 7.0


FILE = {"bytes": 20, "sha256": ["0", "0"]}
NO_FILES = [
    [],
    {"manifest.json": []},
    {"manifest.json": {"bytes": 20}},
    {"\ud800": {"bytes": 0, "sha256": ["0"]}},
]
WRONG = {"bytes": -1}, {"bytes": "20"}, {"bytes": 10**30}, {"sha256": 7}
NO_FILES += [{"manifest.json": FILE | wrong} for wrong in WRONG]
NO_RECORDS = [
    {},
    {"block": 16},
    *(
        {"block": block, "files": {"manifest.json": FILE}}
        for block in (0, -1, "16", 1.5)
    ),
]
NO_RECORDS += [{"block": 16, "files": files} for files in NO_FILES]


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"7", b"[" * 100_000, *NO_RECORDS]
)
def test_digests_that_are_none_are_named_even_if_the_marker_vouches_for_them(
    content, step
):
    (step / steps.DIGESTS).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    steps.commit(step)
    with pytest.raises(
        steps.Damaged, match=r"^digests\.json (is not JSON|.* every block)"
    ):
        StepManifest.read(step)


def test_digests_without_the_manifest_are_named(step):
    (step / steps.DIGESTS).write_text(json.dumps({"block": 16, "files": {}}))
    steps.commit(step)
    with pytest.raises(steps.Damaged, match=r"^digests\.json .* manifest\.json"):
        StepManifest.read(step)

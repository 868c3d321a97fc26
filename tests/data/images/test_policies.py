"""Which operations images get, and how often."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from meshtrain.data.images import policies
from meshtrain.data.images.policies import (
    IMAGENET,
    OPERATIONS,
    RANDAUGMENT,
    autoaugment,
    randaugment,
)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Of every operation its name, share and sign, in place of what it does."""
    found: list[tuple[str, float, int]] = []

    def noting(name: str):
        return lambda image, share, sign: found.append((name, share, sign)) or image

    monkeypatch.setattr(
        policies, "OPERATIONS", {name: noting(name) for name in policies.OPERATIONS}
    )
    return found


def test_randaugment_draws_n_operations_evenly_all_of_one_magnitude(noted):
    draw = np.random.default_rng(0)
    for _ in range(1400):
        randaugment(None, draw, 3, 12.0)
    counts = Counter(name for name, _, _ in noted)
    assert len(noted) == 4200 and set(counts) == set(RANDAUGMENT)
    assert all(abs(count - 300) < 5 * 300**0.5 for count in counts.values()), counts
    assert {share for _, share, _ in noted} == {0.4}
    assert abs(sum(sign for _, _, sign in noted)) < 5 * 4200**0.5


def test_autoaugment_draws_a_pair_and_each_of_its_operations_as_often_as_the_policy_says(
    noted,
):
    draw, times = np.random.default_rng(0), 10_000
    for _ in range(times):
        autoaugment(None, draw)
    expected: Counter[tuple[str, float]] = Counter()
    for pair in IMAGENET:
        for name, probability, magnitude in pair:
            expected[name, magnitude / 9] += times * probability / len(IMAGENET)
    counts = Counter((name, share) for name, share, _ in noted)
    for key, count in expected.items():
        assert abs(counts[key] - count) < 5 * max(count, 1) ** 0.5, key
    assert set(counts) <= set(expected)


DRAW = np.random.default_rng(0)
COLOURS = DRAW.integers(0, 256, (24, 30, 3), dtype=np.uint8)  # 30 wide, 24 high
SMOOTH = np.asarray(
    Image.fromarray(COLOURS).resize((60, 48), Image.Resampling.BICUBIC)
).copy()
# Half of the way; sign 1 or -1 where it matters.
PILLOW = {
    "identity": lambda image, sign: image,
    "autocontrast": lambda image, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, sign: ImageOps.equalize(image),
    "invert": lambda image, sign: ImageOps.invert(image),
    "posterize": lambda image, sign: ImageOps.posterize(image, 6),
    "solarize": lambda image, sign: ImageOps.solarize(image, 128),
    "brightness": lambda image, sign: ImageEnhance.Brightness(image).enhance(
        1 + sign * 0.45
    ),
    "color": lambda image, sign: ImageEnhance.Color(image).enhance(1 + sign * 0.45),
    "contrast": lambda image, sign: ImageEnhance.Contrast(image).enhance(
        1 + sign * 0.45
    ),
    "sharpness": lambda image, sign: ImageEnhance.Sharpness(image).enhance(
        1 + sign * 0.45
    ),
    "rotate": lambda image, sign: image.rotate(sign * 15, Image.Resampling.BILINEAR),
    # Where a pixel comes from: (x + 0.15 y, y) and (x, y + 0.15 x); of 60 x 48 pixels 150 / 331 are 27 x 21, half of
    # them 13 x 10.
    "shear_x": lambda image, sign: moved(image, 1, sign * 0.15, 0, 0, 1, 0),
    "shear_y": lambda image, sign: moved(image, 1, 0, 0, sign * 0.15, 1, 0),
    "translate_x": lambda image, sign: moved(image, 1, 0, sign * 13, 0, 1, 0),
    "translate_y": lambda image, sign: moved(image, 1, 0, 0, 0, 1, sign * 10),
}


def moved(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )


def after(name: str, pixels: np.ndarray, share: float, sign: int = 1) -> np.ndarray:
    return np.asarray(OPERATIONS[name](Image.fromarray(pixels), share, sign)).astype(
        int
    )


@pytest.mark.parametrize(
    "name",
    [
        "shear_x",
        "shear_y",
        "translate_x",
        "translate_y",
        "rotate",
        "brightness",
        "color",
        "contrast",
        "sharpness",
        "identity",
    ],
)
def test_a_magnitude_of_nothing_changes_nothing(name):
    for sign in (1, -1):
        assert np.array_equal(after(name, COLOURS, 0.0, sign), COLOURS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_pillow(name):
    for sign in (1, -1):
        expected = PILLOW[name](Image.fromarray(SMOOTH // 2), sign)
        assert np.array_equal(after(name, SMOOTH // 2, 0.5, sign), np.asarray(expected))
        assert after(name, COLOURS[..., 0], 0.5, sign).shape == (24, 30), (
            "of grey images too"
        )


@pytest.mark.parametrize(
    ("share", "bits"), [(0.0, 8), (0.3, 7), (0.5, 6), (0.75, 5), (1.0, 4)]
)
def test_posterize_keeps_eight_to_four_bits(share, bits):
    assert np.array_equal(
        after("posterize", COLOURS, share), COLOURS >> (8 - bits) << (8 - bits)
    )


@pytest.mark.parametrize(("share", "threshold"), [(0.0, 256), (0.25, 192), (1.0, 0)])
def test_solarize_inverts_from_a_threshold_on(share, threshold):
    expected = np.where(threshold > COLOURS, COLOURS, 255 - COLOURS.astype(int))
    assert np.array_equal(after("solarize", COLOURS, share), expected)


def test_policies_are_as_long_as_their_papers_have_them_and_name_operations_that_there_are():
    assert len(RANDAUGMENT) == len(set(RANDAUGMENT)) == 14 and len(IMAGENET) == 25
    assert {*RANDAUGMENT, *(name for pair in IMAGENET for name, _, _ in pair)} == set(
        OPERATIONS
    )
    assert all(
        0 <= p <= 1 and 0 <= magnitude <= 9
        for pair in IMAGENET
        for _, p, magnitude in pair
    )

"""What is done to one image: crops, shifts, flips."""

import numpy as np
import pytest

from meshtrain.config.images import ImagesConfig
from meshtrain.data.images.augment import (
    RATIO,
    augmented,
    mix,
    mixes,
    partners,
    random_box,
    shifted,
)

PIXELS = np.random.default_rng(0).integers(1, 256, (6, 6, 1), dtype=np.uint8)


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-3, 4), (6, 0), (-7, 1)])
def test_a_shift_moves_pixels_and_leaves_black(down, right):
    moved = shifted(PIXELS, down, right)
    for y, x in np.ndindex(6, 6):
        inside = 0 <= y - down < 6 and 0 <= x - right < 6
        assert moved[y, x, 0] == (PIXELS[y - down, x - right, 0] if inside else 0)


@pytest.mark.parametrize(("height", "width"), [(50, 80), (224, 224), (7, 300)])
def test_a_crop_keeps_its_share_of_the_area_and_about_its_shape(height, width):
    draw, shares = np.random.default_rng(0), []
    for _ in range(500):
        left, top, right, bottom = random_box(height, width, 0.08, draw)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        w, h = right - left, bottom - top
        assert RATIO[0] * 0.85 < w / h < RATIO[1] * 1.15
        shares.append(w * h / (height * width))
    if height < 10:
        assert max(shares) == pytest.approx(
            9 * 7 / (7 * 300)
        )  # none that is drawn fits, but for the smallest
    else:
        assert (
            0.06 < min(shares) < 0.2
            and 0.6 < max(shares) <= 1
            and 0.3 < np.mean(shares) < 0.6
        )


def test_each_shift_of_up_to_so_many_pixels_and_each_side_comes_up_as_often():
    single = np.zeros((7, 7, 1), np.uint8)
    single[3, 2] = 255
    seen = np.zeros((7, 7), int)
    draw = np.random.default_rng(0)
    for _ in range(1800):
        seen += augmented(single, ImagesConfig(shift=1, flip=0.5), 7, draw)[..., 0] > 0
    reached = seen[2:5, 1:6]
    # Columns 1 to 3, and mirrored 3 to 5: the middle is reached from both sides.
    expected = np.array([100, 100, 200, 100, 100])
    assert seen.sum() == reached.sum() == 1800
    assert (abs(reached - expected) < 5 * expected**0.5).all(), reached


def test_without_anything_asked_for_an_image_stays_as_it_is():
    assert augmented(PIXELS, ImagesConfig(), 6, np.random.default_rng(0)) is PIXELS


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_row_is_mixed_with_the_one_beside_it_in_its_batch(count):
    rows = np.arange(count)
    other = partners(rows, np.full(count, count))
    assert (
        other.tolist()
        == {1: [0], 2: [1, 0], 5: [1, 0, 3, 2, 3], 8: [1, 0, 3, 2, 5, 4, 7, 6]}[count]
    )


def blended(
    images: ImagesConfig, draw: np.random.Generator, size: int = 16
) -> tuple[np.ndarray, float]:
    """Of an image of ones and one of zeros: what is left of the first at each place, and its share."""
    first = np.ones((size, size, 2), np.float32)
    share = mix(first, np.zeros_like(first), images, draw)
    return first, share


def test_mixup_is_the_same_share_everywhere_drawn_from_beta():
    draw, shares = np.random.default_rng(0), []
    for _ in range(2000):
        left, share = blended(ImagesConfig(mixup=0.8), draw)
        assert np.allclose(left, share, atol=1e-6)
        shares.append(share)
    # Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1))
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * 2.6), rel=0.08)


@pytest.mark.parametrize("size", [16, 7])
def test_cutmix_pastes_one_box_whose_area_is_the_other_classes_share(size):
    draw, shares = np.random.default_rng(0), []
    for _ in range(500):
        left, share = blended(ImagesConfig(cutmix=1.0), draw, size)
        assert share == pytest.approx(left.mean(), abs=1e-6)
        rows, columns = np.nonzero(left[..., 0] == 0)
        if len(rows):
            box = left[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert not box.any()
        shares.append(share)
    assert min(shares) < 0.2 and max(shares) > 0.95


def test_both_are_switched_between_and_some_images_are_left_alone():
    draw, kinds = np.random.default_rng(0), []
    for _ in range(2000):
        left, share = blended(
            ImagesConfig(mixup=0.8, cutmix=1.0, switch=0.25, mixed=0.6), draw
        )
        kinds.append(
            "none"
            if share == 1
            else "cutmix"
            if set(np.unique(left)) <= {0.0, 1.0}
            else "mixup"
        )
    shares = [kinds.count(kind) / 2000 for kind in ("none", "cutmix", "mixup")]
    # Some boxes fall out so small that nothing is pasted.
    np.testing.assert_allclose(shares, [0.4, 0.15, 0.45], atol=0.04)


def test_nothing_is_mixed_where_nothing_is_asked_for():
    assert mixes(ImagesConfig(mixup=0.8)) and mixes(ImagesConfig(cutmix=1.0))
    assert not mixes(ImagesConfig()) and not mixes(ImagesConfig(mixup=0.8, mixed=0.0))

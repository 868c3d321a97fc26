"""What is done to one image: crops, shifts, flips."""

import numpy as np
import pytest

from meshtrain.config.images import ImagesConfig
from meshtrain.data.images.augment import RATIO, augmented, random_box, shifted

PIXELS = np.random.default_rng(0).integers(1, 256, (6, 6, 1), dtype=np.uint8)


@pytest.mark.parametrize(("down", "right"), [(0, 0), (2, -1), (-3, 4), (6, 0), (-7, 1)])
def test_a_shift_moves_pixels_and_leaves_black(down: int, right: int) -> None:
    moved = shifted(PIXELS, down, right)
    for y, x in np.ndindex(6, 6):
        inside = 0 <= y - down < 6 and 0 <= x - right < 6
        assert moved[y, x, 0] == (PIXELS[y - down, x - right, 0] if inside else 0)


@pytest.mark.parametrize(("height", "width"), [(50, 80), (224, 224), (7, 300)])
def test_a_crop_keeps_its_share_of_the_area_and_about_its_shape(height: int, width: int) -> None:
    draw, shares = np.random.default_rng(0), []
    for _ in range(500):
        left, top, right, bottom = random_box(height, width, 0.08, draw)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        w, h = right - left, bottom - top
        assert RATIO[0] * 0.85 < w / h < RATIO[1] * 1.15
        shares.append(w * h / (height * width))
    if height < 10:
        assert max(shares) == pytest.approx(9 * 7 / (7 * 300))  # none that is drawn fits, but for the smallest
    else:
        assert 0.06 < min(shares) < 0.2 and 0.6 < max(shares) <= 1 and 0.3 < np.mean(shares) < 0.6


def test_each_shift_of_up_to_so_many_pixels_and_each_side_comes_up_as_often() -> None:
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


def test_without_anything_asked_for_an_image_stays_as_it_is() -> None:
    assert augmented(PIXELS, ImagesConfig(), 6, np.random.default_rng(0)) is PIXELS

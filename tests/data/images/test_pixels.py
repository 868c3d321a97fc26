"""Channels, sizes and patches of images, against what a loop over pixels gives."""

import numpy as np
import pytest
from PIL import Image

from meshtrain.data.images.pixels import (
    convert_channels,
    fitted,
    patches,
    resized,
    scaling,
    unpatched,
)

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("size", "patch", "channels"), [(8, 2, 1), (9, 3, 3), (6, 6, 5), (4, 1, 2)]
)
def test_a_patch_holds_its_pixels_row_by_row_each_with_its_channels(
    size, patch, channels
):
    images = DRAW.random((2, size, size, channels), np.float32)
    cut = patches(images, patch)
    across = size // patch
    assert cut.shape == (2, across**2, patch**2 * channels)
    for b, n, p in np.ndindex(cut.shape):
        row, column = divmod(n, across)
        y, x, c = np.unravel_index(p, (patch, patch, channels))
        assert cut[b, n, p] == images[b, row * patch + y, column * patch + x, c]
    assert np.array_equal(unpatched(cut, patch), images)


def test_grey_is_what_pillow_makes_of_colours_and_repeated_where_colours_are_wanted():
    pixels = DRAW.integers(0, 256, (7, 5, 3), dtype=np.uint8)
    assert np.array_equal(
        convert_channels(pixels, 1)[..., 0],
        np.asarray(Image.fromarray(pixels).convert("L")),
    )
    assert np.array_equal(
        convert_channels(pixels[..., :1], 3),
        np.asarray(Image.fromarray(pixels[..., 0]).convert("RGB")),
    )
    with_alpha = np.concatenate([pixels, pixels[..., :1]], -1)
    assert np.array_equal(convert_channels(with_alpha, 3), pixels)
    assert np.array_equal(convert_channels(with_alpha, 1), convert_channels(pixels, 1))


def test_an_image_of_another_shape_is_cropped_to_the_square_in_its_middle_or_stretched():
    wide = np.repeat(
        np.arange(12, dtype=np.uint8)[None, :, None], 4, 0
    )  # 4 high, 12 wide; a number is its column
    assert np.array_equal(fitted(wide, 4, "crop")[0, :, 0], [4, 5, 6, 7])
    assert np.array_equal(
        fitted(wide, 4, "stretch")[0, :, 0], [1, 4, 7, 10]
    )  # the mean of three columns each
    assert (
        fitted(wide, 4, "crop").shape == fitted(wide, 4, "stretch").shape == (4, 4, 1)
    )
    square = wide[:, :4]
    assert (
        fitted(square, 4, "crop") is square and fitted(square, 4, "stretch") is square
    )


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_every_channel_is_resized_like_a_grey_image(channels):
    pixels = DRAW.integers(0, 256, (9, 7, channels), dtype=np.uint8)
    made = resized(pixels, (1, 2, 6, 8), 4)
    for c in range(channels):
        alone = Image.fromarray(pixels[..., c]).resize(
            (4, 4), Image.Resampling.BILINEAR, box=(1, 2, 6, 8)
        )
        assert np.array_equal(made[..., c], np.asarray(alone))


@pytest.mark.parametrize(
    ("mean", "std"), [((), ()), ((0.2,), (0.7,)), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))]
)
def test_pixels_are_normalised_by_the_mean_and_deviation_of_their_channel(mean, std):
    pixels = DRAW.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    factor, term = scaling(mean, std, 3)
    expected = (pixels / 255 - np.array(mean or 0.5)) / np.array(std or 0.5)
    np.testing.assert_allclose(pixels * factor + term, expected, atol=1e-6)

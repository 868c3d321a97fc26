"""The shuffle is a bijection, depends on its key, and looks random."""

import numpy as np
import pytest

from meshtrain.data.permutation import key_of, permute


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4096, 65537])
def test_every_index_comes_up_exactly_once(size):
    order = permute(np.arange(size), size, key_of("test", size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_a_huge_domain_needs_no_memory_and_has_no_collisions_in_a_sample():
    size = 10**12 + 39
    order = permute(np.arange(size - 200_000, size), size, key_of(7))
    assert order.min() >= 0 and order.max() < size
    assert len(np.unique(order)) == len(order)


def test_keys_depend_on_where_their_parts_end():
    assert key_of(1, 23) != key_of(12, 3)


def test_the_order_of_a_run_is_the_same_in_every_version():
    """Written down once: a run that is resumed after an upgrade must meet the rest of its epoch."""
    assert int(key_of(0, "rows", 0)) == 0xA304E90BD7F46D23
    assert permute(np.arange(12), 12, key_of(0, "rows", 0)).tolist() == [
        3,
        0,
        2,
        5,
        8,
        11,
        1,
        7,
        10,
        4,
        9,
        6,
    ]


@pytest.mark.parametrize("size", [13, 100, 1000])
def test_places_are_spread_evenly_over_keys(size):
    """Chi-squared over where each index goes, 1,500 keys; its mean is 1 per degree of freedom, its deviation sqrt(2 /
    freedom).
    """
    keys, seen = 1500, np.zeros((size, size))
    for key in range(keys):
        seen[np.arange(size), permute(np.arange(size), size, key_of("even", key))] += 1
    freedom = (size - 1) ** 2
    statistic = ((seen - keys / size) ** 2 / (keys / size)).sum() / freedom
    assert abs(statistic - 1) < (0.3 if size == 13 else 0.05)


def test_arrays_of_sizes_and_keys_are_permuted_element_by_element():
    sizes = np.array([1, 2, 3, 10, 10, 5000])
    keys = np.array([key_of(k) for k in (0, 1, 2, 3, 3, 4)])
    index = np.array([0, 1, 2, 4, 5, 4999])
    together = permute(index, sizes, keys)
    alone = [
        int(permute(index[i : i + 1], int(sizes[i]), keys[i])[0])
        for i in range(len(index))
    ]
    assert together.tolist() == alone

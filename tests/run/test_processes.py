"""What processes tell one another takes few programs: JAX compiles one for each size of it."""

from meshtrain.run.processes import room


def test_values_of_all_sizes_have_room_in_few():
    sizes = range(1, 5000)
    assert all(room(size) >= size for size in sizes)
    assert len({room(size) for size in sizes}) == 6

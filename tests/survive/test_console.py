"""What of a training process's words reaches the terminal."""

from meshtrain.survive import console


def test_gloo_is_left_out_even_where_its_threads_write_over_one_another(monkeypatch):
    printed: list[tuple[int, bytes]] = []
    monkeypatch.setattr(
        console, "_put", lambda descriptor, text: printed.append((descriptor, text))
    )
    console.echo(
        b"step 1/2\n[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    )
    console.echo(
        b"1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\nstep 2/2\n"
    )
    console.echo(b"Expected number of connected peer ranks is : 1\n")
    assert printed == [(1, b"step 1/2\n"), (1, b"step 2/2\n")]

"""From the engine's thread to the event loop nothing is lost and nobody waits."""

import asyncio
import threading

import pytest

from meshtrain.generate.request import Chosen, Piece
from meshtrain.serve.answering import Channel, joined


def test_joined_pieces_have_all_text_and_the_last_ones_end():
    pieces = [
        Piece("a", (Chosen(1, "a"),), 1),
        Piece("", (Chosen(2, ""),), 2),
        Piece("bc", (Chosen(3, "bc"),), 3, "error", "why"),
    ]
    assert joined(pieces) == Piece(
        "abc", (Chosen(1, "a"), Chosen(2, ""), Chosen(3, "bc")), 3, "error", "why"
    )


def test_pieces_of_many_threads_come_each_in_its_order():
    async def run():
        channel = Channel(every=True)

        def put(choice):
            for k in range(500):
                channel.put(
                    choice,
                    Piece(f"{k} ", tokens=k, finish="stop" if k == 499 else None),
                )

        threads = [threading.Thread(target=put, args=(choice,)) for choice in range(4)]
        for thread in threads:
            thread.start()
        texts, wakes = dict.fromkeys(range(4), ""), 0
        left = set(texts)
        while left:
            wakes += 1
            for choice, piece in (await asyncio.wait_for(channel.take(), 10)).items():
                texts[choice] += piece.text
                left -= {choice} if piece.finish else set()
        return texts, wakes

    texts, wakes = asyncio.run(run())
    assert (
        set(texts.values()) == {"".join(f"{k} " for k in range(500))} and wakes < 2000
    )


def test_who_wants_whole_answers_is_woken_by_their_ends_alone():
    async def run():
        channel = Channel(every=False)
        channel.put(0, Piece("a", tokens=1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.take(), 0.02)
        channel.put(0, Piece("b", tokens=2, finish="stop"))
        return await asyncio.wait_for(channel.take(), 10)

    assert asyncio.run(run()) == {0: Piece("ab", tokens=2, finish="stop")}


def test_pieces_for_a_loop_that_has_ended_go_nowhere():
    async def run():
        return Channel(every=True)

    asyncio.run(run()).put(0, Piece("a"))

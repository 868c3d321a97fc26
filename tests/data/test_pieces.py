"""The table of pieces: every label of every document in exactly one piece, sorted by length."""

from pathlib import Path

import numpy as np
import pytest
from data_configs import config

from meshtrain.config import ConfigError
from meshtrain.data import open_data, pieces
from meshtrain.data.pieces import Pieces, open_pieces
from meshtrain.data.shards import Corpus


@pytest.fixture(scope="module")
def corpus(text: Path) -> Corpus:
    return open_data(config(text))[0].batches.source.corpus  # type: ignore[attr-defined]


@pytest.mark.parametrize("longest", [1, 2, 7, 64, 10_000])
def test_pieces_cover_every_label_once_and_cut_only_at_the_longest(
    corpus: Corpus, tmp_path: Path, longest: int
) -> None:
    table = open_pieces(corpus, longest, tmp_path / "table")
    numbers = np.arange(len(table.first))
    lengths, first = table.lengths(numbers), table.first.astype(int)
    assert np.array_equal(lengths, np.sort(lengths)) and lengths.min() >= 1 and lengths.max() <= longest
    assert np.array_equal(np.bincount(lengths, minlength=longest + 1), table.counts)
    order = np.argsort(first)
    assert np.array_equal(first[order], np.cumsum(lengths[order]) - lengths[order])  # one after the other, without gaps
    assert lengths.sum() == corpus.labels
    edges = np.concatenate([np.diff(offsets.astype(int)) for offsets in corpus.offsets]).cumsum()
    assert set(edges) <= set((first + lengths).tolist())  # no piece reaches over the end of a document
    cut = ~np.isin(first + lengths, edges)
    assert (lengths[cut] == longest).all()


def test_the_table_does_not_depend_on_how_many_documents_are_taken_at_once(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(at_once: int) -> Pieces:
        monkeypatch.setattr(pieces, "DOCUMENTS_AT_ONCE", at_once)
        return open_pieces(corpus, 64, tmp_path / str(at_once))

    whole, bit_by_bit = table(10**6), table(7)
    assert np.array_equal(whole.ends, bit_by_bit.ends) and np.array_equal(whole.first, bit_by_bit.first)


def test_the_table_is_made_once(corpus: Corpus, tmp_path: Path) -> None:
    open_pieces(corpus, 64, tmp_path / "table")
    made = (tmp_path / "table").stat()
    open_pieces(corpus, 64, tmp_path / "table")
    assert (tmp_path / "table").stat() == made
    assert [p.name for p in tmp_path.iterdir()] == ["table"]


def test_a_cache_that_cannot_be_written_is_told(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        open_pieces(corpus, 64, tmp_path / "file" / "table")

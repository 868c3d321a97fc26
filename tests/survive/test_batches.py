"""The log of the rows that a rank read: a disk that takes none of it ends nothing."""

import numpy as np

from meshtrain.survive.supervised import BatchLog
from tests.helpers.supervised import supervised


def test_on_a_full_disk_lines_wait_and_the_rank_goes_on(tmp_path, capsys):
    told = supervised(tmp_path)
    told.own("batches.jsonl").symlink_to("/dev/full")
    log = BatchLog(told)
    for step in (1, 2):
        log.add({"tokens": np.zeros((2, 4), np.int32)})
        log.write(step, 0)
    log.close()
    assert "the last 2 rows of" in capsys.readouterr().err

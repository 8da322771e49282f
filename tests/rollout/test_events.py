"""The record of events, and truncated lines."""

import pytest

from posttrain.rollout.journal import BatchEvents, EventLog, WeightUpdate


def recorded(batch):
    return BatchEvents(batch, [WeightUpdate(0, batch, 2 * batch)], 3, "0" * 16)


@pytest.mark.parametrize("cut", [1, 20])
def test_lines_after_a_truncated_line_can_be_read(cut, tmp_path):
    log = EventLog(tmp_path)
    for batch in (1, 2, 3):
        log.append(recorded(batch))
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    log.keep_until(2)
    for batch in (3, 4):
        log.append(recorded(batch))
    assert log.read() == {batch: recorded(batch) for batch in (1, 2, 3, 4)}

"""The desk and the line of ranks that share a folder: what is said when the work is over."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

from tilefold.retrieval._group import Desk, Line, connection_of, serve
from tilefold.retrieval.errors import RankError


@pytest.mark.parametrize("well", [True, False])
def test_a_rank_that_has_heard_the_last_word_leaves_at_once(well: bool) -> None:
    here, there = socket.socketpair()
    desk = Desk(1)
    thread = serve(desk, 1, connection_of(here))
    connection = connection_of(there)
    with connection:
        line = Line(1, connection)
        desk.begin([0])
        assert line.take() == (0, {}) and line.take() is None
        if well:
            desk.over()
            line.wait()
        else:
            desk.stop(ValueError("no disk"))
            with pytest.raises(RankError, match="rank 0: ValueError: no disk"):
                line.wait()
    start = time.monotonic()
    thread.join(timeout=5)
    assert not thread.is_alive() and time.monotonic() - start < 1


def test_the_last_word_may_come_before_the_answer_to_the_last_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's own thread says that all is over as soon as the shard is listed."""
    here, there = socket.socketpair()
    desk = Desk(1)
    hand_in = desk.hand_in

    def slow(*given: Any) -> None:
        hand_in(*given)
        desk.over()
        time.sleep(0.3)

    monkeypatch.setattr(desk, "hand_in", slow)
    serve(desk, 1, connection_of(here))
    with connection_of(there) as connection:
        line = Line(1, connection)
        desk.begin([0])
        assert line.take() == (0, {})
        ended = threading.Thread(target=line.hand_in, args=(0, {"rows": 1}, {}), daemon=True)
        ended.start()
        ended.join(timeout=5)  # it waited for its answer without end
        assert not ended.is_alive()
        assert line.take() is None
        line.wait()

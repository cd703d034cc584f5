"""The desk and the line of ranks that share a folder: what is said when the work is over."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sentence_transformers")

from tilefold.retrieval._group import Desk, Line, connection_of, serve
from tilefold.retrieval.errors import DataError, RankError


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


@pytest.mark.parametrize("equal", [True, False])
def test_nothing_is_listed_before_all_ranks_have_said_what_they_would_write(equal: bool) -> None:
    """A rank that loads its model for long may turn out to encode other texts."""
    listed: list[int] = []
    writer: Any = SimpleNamespace(
        manifest=None,
        identified=lambda manifest: {"texts_sha256": "a"},
        list_shard=lambda number, stored, failed: listed.append(number),
    )
    desk = Desk(2, others=2)
    desk.begin([0, 1])
    desk.open(writer)
    desk.hand_in(0, {"rows": 1}, {})
    desk.identify(2, {"texts_sha256": "a"})
    assert listed == [] and desk.left == [0, 1]
    desk.identify(1, {"texts_sha256": "a" if equal else "b"})
    assert listed == ([0] if equal else [])
    if equal:
        desk.hand_in(1, {"rows": 1}, {})
        assert listed == [0, 1] and desk.left == []
    else:
        with pytest.raises(DataError, match=r"rank 1 encodes something else \(texts_sha256: "):
            desk.hand_in(1, {"rows": 1}, {})


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

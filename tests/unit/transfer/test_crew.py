"""Connections of one fetch: kept for the next while it goes on, and closed when it is over."""

from __future__ import annotations

from typing import Any

import pytest

from ftckpt.transfer.crew import Crew
from ftckpt.transfer.order import Order, Patience


class Channel:
    """What a connection has open."""

    closed = False

    def abort(self) -> None:
        """As when the fetch ends."""

    def close(self) -> None:
        self.closed = True


@pytest.mark.covers("I11", "F76")
@pytest.mark.parametrize("late", [False, True], ids=["before the end", "after it"])
def test_a_connection_that_is_put_back_is_closed_when_the_fetch_ends_whoever_is_first(late: bool) -> None:
    crew = Crew(Order(urls=("http://127.0.0.1:9",), step=1, job="job", key=b"k", connections=1, chunk=1, patience=Patience()), None)
    (source,) = crew.sources
    connection = crew.connect(source)
    channel: Any = Channel()
    connection._channel = channel
    if late:
        crew.stop()
        crew.rest(source, connection)
    else:
        crew.rest(source, connection)
        assert crew.connect(source) is connection
        crew.rest(source, connection)
        crew.stop()
    assert channel.closed

"""What is taken from a peer lands where it belongs, or nowhere: by name, of the same shapes, and given on at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]


@pytest.mark.covers("I5")
@pytest.mark.parametrize("worthless", [False, True], ids=["kept", "in place"])
def test_tensors_are_matched_by_name_and_not_by_order(members: Start, worthless: bool) -> None:
    (source,), (joiner,) = members("source"), members("joiner", backwards=True)
    source.call("publish", step=4, marked=True)
    got = joiner.call("heal", metadata=source.metadata, step=4, worthless=worthless)
    assert "error" not in got, got
    assert bool(got["placed"]) == worthless
    assert joiner.call("mixed") == {"names": []}


@pytest.mark.covers("F40", "F51", "I5")
@pytest.mark.parametrize("worthless", [False, True], ids=["kept", "in place"])
def test_load_code_of_modules_runs_once_when_a_peers_state_is_there(members: Start, worthless: bool) -> None:
    source, joiner = members("source", "joiner", code=True, seed=1)
    source.call("grow", size=5)
    source.call("publish", step=4)
    got = joiner.call("heal", metadata=source.metadata, step=4, worthless=worthless)
    assert "error" not in got, got
    assert got["numbers"] == [4.0]
    assert ("model/4.weight" in got["placed"]) == worthless
    assert joiner.call("derived") == {"loads": 1, "right": True, "window": [4.0] * 5}


@pytest.mark.covers("I14", "I5")
@pytest.mark.parametrize("worthless", [False, True], ids=["kept", "in place"])
def test_a_peer_whose_shards_are_cut_otherwise_is_a_typed_error_and_changes_nothing(members: Start, worthless: bool) -> None:
    """torchft pairs rank with rank: a group of another size, or another mesh, cannot be served by it."""
    (source,), (joiner,) = members("source", side=128), members("joiner", side=96, seed=1)
    before = joiner.call("look")
    source.call("publish", step=4)
    got = joiner.call("heal", metadata=source.metadata, step=4, worthless=worthless)
    assert got["error"] == "Mismatch", got
    assert "0.weight" in got["text"]
    assert "128" in got["text"]
    assert "96" in got["text"]
    after = joiner.call("look")
    assert (after["digest"], after["numbers"]) == (before["digest"], before["numbers"])


@pytest.mark.covers("F54", "F56")
def test_who_has_healed_gives_the_state_on_though_its_source_has_gone(members: Start) -> None:
    source, first, second = members("source", "first", "second")
    source.call("publish", step=4, marked=True)
    assert "error" not in first.call("heal", metadata=source.metadata, step=4)
    source.kill()
    first.call("publish", step=4, marked=True)
    got = second.call("heal", metadata=first.metadata, step=4)
    assert list(got["sources"]) == [first.url], got
    assert second.call("mixed") == {"names": []}

"""An image of a peer on this host is read from its memory where that is possible, and over its socket where it is not; always verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serving import JOB, SECRET, pattern

from ftckpt.errors import PeerError
from ftckpt.transfer import fetch
from ftckpt.transfer.near import NearImage

SIZE = 3_000_001


def take(*urls: str, **options: Any) -> tuple[Any, bytearray]:
    room = bytearray(SIZE)
    return fetch(urls, 5, JOB, SECRET, lambda doc: memoryview(room), **options), room


@pytest.mark.covers("I9", "F55")
def test_it_is_read_from_memory_and_nothing_of_it_over_the_socket(peer: Callable[..., Any], proxy: Callable[..., Any]) -> None:
    link = proxy(peer(size=SIZE, near="told").url)
    got, room = take(link.url)
    assert room == pattern(SIZE, 1)
    assert got.near
    assert got.sources == {link.url: SIZE}
    assert link.passed < 20_000  # the documents


@pytest.mark.covers("I9")
@pytest.mark.parametrize("wrong", ["boot", "inode", "nobody", "beyond", "odd", "negative", "may shrink"])
def test_where_it_cannot_be_the_socket_is_used(wrong: str, peer: Callable[..., Any]) -> None:
    got, room = take(peer(size=SIZE, near=wrong).url)
    assert room == pattern(SIZE, 1)
    assert not got.near
    assert not got.dropped


@pytest.mark.covers("I9")
def test_it_is_not_read_from_memory_where_that_is_not_wanted(peer: Callable[..., Any]) -> None:
    got, room = take(peer(size=SIZE, near="told").url, share_memory=False)
    assert room == pattern(SIZE, 1)
    assert not got.near


@pytest.mark.covers("I9", "F54")
def test_memory_that_changed_meanwhile_is_seen_and_the_rest_comes_from_another(peer: Callable[..., Any]) -> None:
    bad, good = peer(size=SIZE, near="changed").url, peer(size=SIZE, near="told").url
    with pytest.raises(PeerError, match="bad bytes in block"):
        take(bad)
    got, room = take(bad, good)
    assert room == pattern(SIZE, 1)
    assert "bad bytes" in got.dropped[bad]
    assert not got.near


@pytest.mark.covers("I9", "F52")
def test_a_source_that_dies_while_it_is_read_takes_nothing_away(peer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    source = peer(size=SIZE, near="told")
    read = NearImage.blocks_into

    def killed_first(self: NearImage, *args: Any) -> None:
        source.process.kill()
        source.process.wait(10)
        read(self, *args)

    monkeypatch.setattr(NearImage, "blocks_into", killed_first)
    got, room = take(source.url)
    assert room == pattern(SIZE, 1)
    assert got.near

"""Positions of replicas that are gone for good, where each replica has a loader of its own."""

from __future__ import annotations

import pytest

from ftckpt import Checkpointer
from ftckpt.domain.cursors import best_entry, redistribute
from ftckpt.errors import ConfigError, DataError


@pytest.mark.covers("F47")
def test_orphaned_positions_are_an_error_by_default_that_names_them() -> None:
    with pytest.raises(DataError, match=r"r1 \(5 draws\), r3 \(2 draws\)"):
        redistribute({"r0": 4, "r1": 5, "r2": 0, "r3": 2}, ["r0", "r2"], "strict")


@pytest.mark.covers("F47")
def test_survivors_adopt_orphans_in_turn() -> None:
    plan = redistribute({"r0": 4, "r1": 5, "r2": 1, "r3": 2, "r4": 3}, ["r0", "r2"], "adopt")
    assert plan == {"r0": ("r0", "r1", "r4"), "r2": ("r2", "r3")}


def test_restart_lets_go_of_all() -> None:
    assert redistribute({"r0": 4, "r1": 5}, ["r0"], "restart") == {"r0": ()}


def test_newcomers_and_untouched_loaders_are_no_matter() -> None:
    assert redistribute({"r0": 4, "r9": 0}, ["r0", "r1"], "strict") == {"r0": ("r0",), "r1": ("r1",)}


def test_nobody_to_adopt_is_an_error() -> None:
    with pytest.raises(DataError):
        redistribute({"r0": 4}, [], "adopt")


def test_best_entry_is_the_newest_that_does_not_go_too_far() -> None:
    assert [best_entry([0, 3, 9], n) for n in (-1, 0, 4, 9, 50)] == [None, 0, 3, 9, 9]


@pytest.mark.parametrize("word", ["Strict", "restrat", "", None])
def test_a_word_that_is_not_known_is_no_word_to_let_positions_go(word: object) -> None:
    with pytest.raises(ConfigError, match="is not known"):
        Checkpointer.resume(object(), data=word)  # type: ignore[arg-type]  # refused before anything is looked at

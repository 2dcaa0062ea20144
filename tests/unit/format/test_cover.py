"""Shards together hold every element once, or the generation is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import Mismatch
from ftckpt.format.cover import check_cover
from ftckpt.format.plan import plan_image
from ftckpt.format.table import TensorTable

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tables(shape: tuple[int, ...], owned: dict[int, list[Box]]) -> list[tuple[str, TensorTable]]:
    return [(f"r{rank}", plan_image([("w", "float32", shape, o, s) for o, s in boxes])) for rank, boxes in owned.items()]


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    spans = [list(itertools.pairwise(c)) or [(0, 0)] for c in cuts]
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]
    return shape, boxes


@pytest.mark.covers("I1")
@given(grids(), st.data())
def test_every_cut_into_a_grid_is_whole_whoever_holds_which_box(grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = grid
    owned: dict[int, list[Box]] = {}
    for box in boxes:
        owned.setdefault(data.draw(st.integers(0, 3)), []).append(box)
    check_cover(tables(shape, owned))


@given(grids().filter(lambda g: 0 not in g[0]), st.data())
def test_missing_or_doubled_box_is_refused(grid: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    shape, boxes = grid
    index = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(Mismatch, match="hold the same elements"):
        check_cover(tables(shape, {0: boxes, 1: [boxes[index]]}))
    if len(boxes) > 1:
        with pytest.raises(Mismatch, match="elements are held"):
            check_cover(tables(shape, {0: boxes[:index] + boxes[index + 1 :]}))


def test_overlap_that_makes_up_for_a_gap_is_found() -> None:
    with pytest.raises(Mismatch, match=r"r0 \[0:2\] and r1 \[1:3\]"):
        check_cover(tables((4,), {0: [((0,), (2,))], 1: [((1,), (2,))]}))


def test_different_shapes_are_named_with_their_shards() -> None:
    one, two = plan_image([("w", "float32", (4,), (0,), (2,))]), plan_image([("w", "float32", (5,), (2,), (3,))])
    with pytest.raises(Mismatch, match=r"\[4\] in r0 and float32 \[5\] in r1"):
        check_cover([("r0", one), ("r1", two)])

"""Leaves of a group's ranks put together; where values differ the key is named."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from leaf_tools import nested

from ftckpt.errors import Mismatch
from ftckpt.format.leaves import decode_tree, encode_tree
from ftckpt.format.merging import merge_leaves


@pytest.mark.covers("F43")
def test_ranks_are_merged_by_key_whatever_their_order():
    a = {"opt": encode_tree({"state": {0: {"step": 1}, "x": {"step": 2}}, "lr": 0.1})}
    b = {"opt": encode_tree({"lr": 0.1, "state": {"x": {"step": 2}, 7: {"step": 9}}}), "more": encode_tree((1,))}
    merged = merge_leaves([a, b])
    assert decode_tree(merged["opt"]) == {"state": {0: {"step": 1}, "x": {"step": 2}, 7: {"step": 9}}, "lr": 0.1}
    assert decode_tree(merged["more"]) == (1,)


@pytest.mark.covers("F43")
def test_order_of_keys_inside_lists_is_no_difference():
    docs = [{"opt": encode_tree({"groups": groups})} for groups in ([{"lr": 1, "wd": 2}], [{"wd": 2, "lr": 1}])]
    assert decode_tree(merge_leaves(docs)["opt"]) == {"groups": [{"lr": 1, "wd": 2}]}


def test_empty_and_tagged_dicts_merge():
    merged = merge_leaves([{"o": encode_tree({"s": {}})}, {"o": encode_tree({"s": {5: 1}})}, {"o": encode_tree({"s": {"k": 2}})}])
    assert decode_tree(merged["o"]) == {"s": {5: 1, "k": 2}}


@pytest.mark.parametrize(
    ("x", "y"), [(1, 2), (1, 1.0), (True, 1), (0.0, -0.0), ([1], [1, 2]), ((1,), [1]), ({}, None), ({1}, frozenset({1}))]
)
def test_different_values_are_a_mismatch_naming_the_key(x, y):
    docs = [{"opt": encode_tree({"groups": {"lr": v}})} for v in (x, y)]
    with pytest.raises(Mismatch, match="opt/groups/lr"):
        merge_leaves(docs)


@given(nested)
def test_merging_a_tree_with_itself_changes_nothing(value):
    doc = {"s": encode_tree(value)}
    assert msgspec.json.encode(merge_leaves([doc, doc])) == msgspec.json.encode(doc)

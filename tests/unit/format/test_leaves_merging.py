"""Leaves of a group's ranks put together; where values differ the key is named."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaf_tools import nested

from ftckpt.errors import Damaged, FtckptError, Mismatch
from ftckpt.format.leaves import decode_tree, encode_tree
from ftckpt.format.merging import Part, Seen, merge_leaves, merge_parts


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


def of_two(first: object, path: tuple[str | int, ...], sketch: object = 1):
    """What rank 0 writes under x put together with what rank 1 has somewhere in it."""
    return merge_parts({0: Part(states={"x": first}), 1: Part(states={}, seen=[Seen(("x", *path), sketch)])})[0]["x"]


@pytest.mark.covers("F43")
@pytest.mark.parametrize(
    ("first", "path", "where"),
    [(5, ("groups", "d"), "x"), ({"groups": [1]}, ("groups", "d"), "x/groups"), ({"d": [{"o": 1}]}, ("d", 1, "o"), "x/d"),
     ({"d": [{"o": 1}]}, ("d", -1, "o"), "x/d"), ({"d": {"o": 1}}, ("d", 0), "x/d"), ({"d": None}, ("d", 0, "o"), "x/d"),
     ({"d": [1]}, ("d", 1), "x/d"), ("text", (0,), "x")],
    ids=range(8),
)  # fmt: skip
def test_where_the_way_to_a_value_is_not_the_same_on_all_ranks_that_is_the_difference(first, path, where):
    with pytest.raises(Mismatch, match=rf"\n  {where} differs between rank 0 and rank\(s\) 1\n"):
        of_two(first, path)


def test_a_rank_is_named_once_whatever_it_has_below_what_differs():
    seen = [Seen(("x", "groups", index, "options"), 1) for index in range(3)]
    with pytest.raises(Mismatch, match=r"x differs between rank 0 and rank\(s\) 1\n"):
        merge_parts({0: Part(states={"x": 5}), 1: Part(states={}, seen=seen)})


def test_what_only_one_rank_has_is_put_where_it_was():
    assert of_two({}, ("state", "w", "n"), 3) == {"state": {"w": {"n": 3}}}
    assert of_two({"d": [{}]}, ("d", 0, "o"), 3) == {"d": [{"o": 3}]}


@pytest.mark.covers("I10")
@pytest.mark.parametrize("tree", [{"$dict": 5}, {"$dict": [5]}, {"$dict": [[1]]}, {"a": {"$dict": [[1, 2], None]}}], ids=range(4))
def test_a_document_that_no_encoder_made_is_damaged(tree):
    with pytest.raises(Damaged, match="ranks 0 to 1 have sent leaves that are no encoded trees"):
        merge_leaves([{"s": tree}, {"s": {"a": {}, **tree} if "a" in tree else {"b": 1}}])


steps = st.sampled_from(["x", "a", "$dict", "$t", "$same"]) | st.integers(-2, 3)
trees = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from(["x", "y"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "x", "$dict", "$t", "$same"]), inner, max_size=2),
    max_leaves=8,
)
parts = st.builds(
    Part,
    states=st.dictionaries(st.just("x"), trees),
    seen=st.lists(st.builds(Seen, st.lists(steps, max_size=4).map(tuple), trees), max_size=3),
)


@pytest.mark.covers("I10")
@given(st.lists(parts, min_size=1, max_size=3))
def test_whatever_ranks_send_is_put_together_or_a_typed_error(sent):
    sent = msgspec.json.decode(msgspec.json.encode(sent), type=list[Part])
    try:
        merged, _ = merge_parts(dict(enumerate(sent)))
    except FtckptError:
        return
    msgspec.json.encode(merged)

"""When to save."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.domain.policy import AnyOf, AtEnd, AtSteps, Every, Moment, Never
from ftckpt.errors import ConfigError


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
    [
        (Every(5), Moment(0, 0), False),
        (Every(5), Moment(5, 5), True),
        (Every(5), Moment(5, 0), False),  # saved at this step already
        (Every(5), Moment(6, 1), False),
        (AtSteps((1, 7)), Moment(1, 1), True),
        (AtSteps((1, 7)), Moment(7, 0), False),
        (AtSteps((1, 7)), Moment(2, 1), False),
        (AtEnd(), Moment(3, 3, ending=True), True),
        (AtEnd(), Moment(3, 0, ending=True), False),
        (AtEnd(), Moment(0, 0, ending=True), False),
        (AtEnd(), Moment(3, 3), False),
        (Never(), Moment(5, 5, ending=True), False),
    ],
)
@pytest.mark.covers("A7")
def test_each_policy_at_each_moment(policy: Every | AtSteps | AtEnd | Never, moment: Moment, due: bool) -> None:
    assert policy.due(moment) is due


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 50), st.booleans())
def test_policies_joined_by_or_are_due_when_any_is(steps: int, step: int, since: int, ending: bool) -> None:
    at = Moment(step, since, ending)
    joined = Every(steps) | AtEnd() | AtSteps((3,))
    assert joined.due(at) == any(p.due(at) for p in (Every(steps), AtEnd(), AtSteps((3,))))


@pytest.mark.covers("F32")
@given(st.integers(1, 50), st.integers(0, 200), st.booleans())
def test_nothing_is_due_twice_at_one_step(steps: int, step: int, ending: bool) -> None:
    assert not AnyOf((Every(steps), AtEnd(), AtSteps((step,)))).due(Moment(step, 0, ending))


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ConfigError):
        Every(0)

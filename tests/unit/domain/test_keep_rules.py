"""Rules of retention: golden plans of each and of their unions, their text form, and what holds for every plan."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.domain.keep import AnyKeep, Keep, KeepBest, KeepEvery, KeepLast, KeepSteps, KeepYounger, parse_keep
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import lineage
from ftckpt.domain.retention import SPARE, plan
from ftckpt.errors import ConfigError


def log_of(shape: str, losses: dict[int, float] | None = None, times: dict[int, float] | None = None) -> list[Entry]:
    """``g<step>`` a generation, ``o<base>`` an open of a base; index = position; loss and time by index."""
    entries: list[Entry] = []
    for index, word in enumerate(shape.split()):
        common: dict[str, Any] = {
            "index": index,
            "log": "u",
            "prev": index - 1,
            "trajectory": f"{index:064x}",
            "attempt": f"{index:08x}",
            "writer": "r",
        }
        if word[0] == "g":
            metrics = {"loss": losses[index]} if losses and index in losses else {}
            time = (times or {}).get(index, 0.0)
            entries.append(
                Entry(kind="generation", step=int(word[1:]), base=index - 1, location=f"s{index}", metrics=metrics, time=time, **common)
            )
        else:
            base = int(word[1:])
            entries.append(Entry(kind="open", step=entries[base].step, base=base, **common))
    return entries


LONG = "g500 g1000 g1500 g2000 g2500 g3000"

GOLDEN: list[tuple[str, str, dict[int, float], tuple[int, ...]]] = [
    # shape, policy, loss by index, deleted
    (LONG, "1", {}, (0, 1, 2, 3, 4)),  # one rolling generation
    (LONG, "last:1,steps:1000;1500", {}, (0, 3, 4)),  # B11: rolling, with listed steps kept
    (LONG, "last:2,every:1000", {}, (0, 2)),
    (LONG, "every:1000", {}, (0, 2)),  # without ``last`` the two newest stay: #4 is not a multiple
    ("g700 g1300 g1900 g2100 g2200 g2300", "last:1,every:1000", {}, (0, 2, 4)),  # the first at or after each multiple
    (LONG, "last:1,best:loss:min", {0: 3.0, 1: 1.0, 2: 2.0, 5: 9.0}, (0, 2, 3, 4)),
    (LONG, "last:1,best:loss:max:2", {0: 3.0, 1: 1.0, 2: 2.0}, (1, 3, 4)),
    (LONG, "last:1,best:loss", {0: math.nan, 1: 1.0, 2: 1.0}, (0, 1, 3, 4)),  # NaN never counts; of equal ones the newer
    (LONG, "last:1,best:acc:max", {}, (0, 1, 2, 3, 4)),  # nobody recorded it
    ("g1 g2 g3 o0 g4 g5", "last:1,best:loss:min", {1: 0.1, 4: 5.0, 0: 7.0}, (0, 1, 2)),  # the abandoned branch's best does not count
    ("g1 g2 g3 o0 g4 g5", "last:2,steps:2", {}, (0, 1, 2)),  # nor its listed steps
    (LONG, "last:1,all", {}, ()),
]


@pytest.mark.covers("B2", "B11", "B12", "A12")
@pytest.mark.parametrize(("shape", "policy", "losses", "deleted"), GOLDEN)
def test_golden_plans_of_rules_and_unions(shape: str, policy: str, losses: dict[int, float], deleted: tuple[int, ...]) -> None:
    made = plan(parse_keep(policy), log_of(shape, losses))
    assert made.doomed == deleted
    assert all(v.why for v in made.verdicts)


def test_younger_keeps_by_the_time_in_the_record_and_wants_to_be_told_the_time() -> None:
    entries = log_of("g1 g2 g3 g4", times={0: 10.0, 1: 70.0, 2: 75.0, 3: 80.0})
    assert plan(parse_keep("last:1,younger:20s"), entries, now=90.0).doomed == (0, 1)
    with pytest.raises(ConfigError, match="time"):
        plan(parse_keep("younger:20"), entries)


@pytest.mark.covers("B2")
def test_a_damaged_best_makes_way_for_the_next_best() -> None:
    entries = log_of("g1 g2 g3 g4", {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})
    made = plan(parse_keep("last:1,best:loss"), entries)
    assert (made.relied, made.doomed) == ((0, 3), (1, 2))
    after = plan(parse_keep("last:1,best:loss"), entries, unsound={0: "shard"})
    assert after.doomed == (2,)  # the damaged one is not evidence, and not removed behind the user's back either
    assert "does not verify" in after.verdicts[0].why


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("3", KeepLast(3)),
        (3, KeepLast(3)),
        (None, KeepLast(None)),
        ("all", KeepLast(None)),
        ("last:3", KeepLast(3)),
        ("every:1000", KeepEvery(1000)),
        ("steps:900;500", KeepSteps((500, 900))),
        ("best:loss", KeepBest("loss", "min")),
        ("best:acc:max:2", KeepBest("acc", "max", 2)),
        ("younger:7d", KeepYounger(7 * 86400.0)),
        ("last:3, best:loss:min", AnyKeep((KeepLast(3), KeepBest("loss")))),
    ],
)
def test_text_form_is_read_and_written(text: str | int | None, rule: Keep) -> None:
    assert parse_keep(text) == rule
    assert parse_keep(str(rule)) == rule


@pytest.mark.covers("F13", "A20")
@pytest.mark.parametrize(
    "text",
    [
        "0",
        0,
        "last:0",
        "last",
        "every:0",
        "best",
        "best:loss:mid",
        "best:a:min:0",
        "younger:0",
        "younger:-1d",
        "steps:x",
        "sometimes:3",
        "",
        "3,",
    ],
)
def test_what_cannot_be_kept_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_keep(text)


@pytest.mark.covers("F13", "A20")
def test_keeping_none_is_refused_with_the_hint_how_to_keep_all() -> None:
    with pytest.raises(ConfigError, match="keep=None"):
        parse_keep("0")


def test_rules_compose() -> None:
    assert KeepLast(3) | KeepEvery(10) | KeepSteps((1,)) == AnyKeep((KeepLast(3), KeepEvery(10), KeepSteps((1,))))


@st.composite
def worlds(draw: st.DrawFn) -> list[Entry]:
    words, step, generations = [], 0, []
    for index in range(draw(st.integers(1, 12))):
        if generations and draw(st.integers(0, 4)) == 0:
            words.append(f"o{draw(st.sampled_from(generations))}")
        else:
            step += draw(st.integers(1, 3))
            words.append(f"g{step}")
            generations.append(index)
    losses = {i: draw(st.sampled_from([1.0, 2.0, math.nan])) for i in generations if draw(st.booleans())}
    return log_of(" ".join(words), losses, {i: draw(st.floats(0, 100)) for i in generations})


RULES = st.one_of(
    st.builds(KeepLast, st.integers(1, 4)),
    st.builds(KeepEvery, st.integers(1, 6)),
    st.builds(KeepSteps, st.tuples(st.integers(1, 12), st.integers(1, 12))),
    st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    st.builds(KeepYounger, st.floats(1, 100)),
)
POLICIES = st.lists(RULES, min_size=1, max_size=3).map(lambda rules: rules[0] if len(rules) == 1 else AnyKeep(tuple(rules)))
INDICES = st.sets(st.integers(0, 11))


@pytest.mark.covers("I7", "F9")
@given(worlds(), POLICIES, INDICES, INDICES)
def test_every_policy_leaves_the_tail_what_is_held_and_enough_sound_ones(
    entries: list[Entry], policy: Keep, pins: set[int], bad: set[int]
) -> None:
    made = plan(policy, entries, pins=pins, unsound=dict.fromkeys(bad, "?"), now=100.0)
    kept, tail = set(made.kept), entries[-1]
    sound = [e.index for e in lineage(entries, tail) if e.index not in bad]
    least = max((r.count or 0 for r in policy.parts if isinstance(r, KeepLast)), default=SPARE)
    assert set(sound[:least]) <= kept
    assert (tail.base if tail.kind == "open" else tail.index) in kept
    assert pins & {v.entry.index for v in made.verdicts} <= kept
    assert set(made.relied) <= kept - bad


@pytest.mark.covers("I7")
@given(worlds(), POLICIES, INDICES)
def test_a_plan_carried_out_leaves_nothing_more_to_do(entries: list[Entry], policy: Keep, bad: set[int]) -> None:
    made = plan(policy, entries, unsound=dict.fromkeys(bad, "?"), now=100.0)
    left = [e for e in entries if e.index not in made.doomed]
    assert plan(policy, left, unsound=dict.fromkeys(bad, "?"), now=100.0).doomed == ()


@pytest.mark.covers("I7", "B2")
@given(worlds(), POLICIES, POLICIES)
def test_a_union_keeps_whatever_one_of_its_policies_selects(entries: list[Entry], one: Keep, other: Keep) -> None:
    path = lineage(entries, entries[-1])
    kept = set(plan(one | other, entries, now=100.0).kept)
    assert set(one.chosen(path, 100.0)) | set(other.chosen(path, 100.0)) <= kept


@pytest.mark.covers("F11")
@given(worlds(), st.one_of(st.builds(KeepLast, st.integers(1, 4)), st.builds(KeepEvery, st.integers(1, 6))), st.permutations(range(12)))
def test_times_decide_nothing_for_rules_that_do_not_ask_for_them(entries: list[Entry], policy: Keep, times: list[int]) -> None:
    other = [msgspec.structs.replace(e, time=float(times[e.index])) for e in entries]
    assert plan(policy, other).doomed == plan(policy, entries).doomed

"""What may be deleted: golden plans, and what holds for every plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import lineage
from ftckpt.domain.retention import KeepLast, plan, still_withdrawn
from ftckpt.errors import ConfigError


def log_of(shape: str) -> list[Entry]:
    """Entries from a word per entry: ``g<step>`` a generation, ``o<base>`` an open of a base, ``-`` a withdrawn one."""
    entries: list[Entry] = []
    for index, word in enumerate(shape.split()):
        if word == "-":
            continue
        common = {"index": index, "log": "u", "prev": index - 1, "trajectory": f"{index:064x}", "attempt": f"{index:08x}", "writer": "r"}
        if word[0] == "g":
            entries.append(Entry(kind="generation", step=int(word[1:]), base=index - 1, location=f"s{index}", **common))
        else:
            base = int(word[1:])
            step = next((e.step for e in entries if e.index == base), 0)
            entries.append(Entry(kind="open", step=step, base=base, **common))
    return entries


GOLDEN = [
    # shape, keep, pins, readers, unsound, deleted
    ("g1 g2 g3", None, (), (), {}, ()),
    ("g1 g2 g3", 1, (), (), {}, (0, 1)),
    ("g1 g2 g3", 3, (), (), {}, ()),
    ("g1 g2 g3 g4 g5", 3, (0,), (), {}, (1,)),  # F12: newest three and the pin
    ("g1 g2 g3 g4 g5", 3, (), (1,), {}, (0,)),  # someone reads #1
    ("g1 g2 g3", 1, (), (), {2: "shard"}, (0,)),  # the tail is unsound: #1 is what counts, the tail is never deleted
    ("g1 g2 g3", 2, (), (), {1: "shard"}, ()),  # fewer sound ones than wanted: nothing goes
    ("g1 g2 g3 g4", 2, (), (), {1: "shard"}, (0, 1)),
    ("g1 g2 g3 o0", 1, (), (), {}, ()),  # the open's base is what counts; the branch above it is newer
    ("g1 g2 g3 o0 g4", 1, (), (), {}, (0, 1, 2)),  # the branch neither counts nor evicts, and goes when all that counts is newer
    ("g1 g2 g3 o0 g4", 2, (), (), {}, ()),  # #0 and #4 count; the abandoned #1, #2 are newer than #0
    ("g1 g2 g3 o0 g4 g5", 2, (2,), (), {}, (0, 1)),
    ("- - g3 g4", 1, (), (), {}, (2,)),
    ("", 1, (), (), {}, ()),
]


@pytest.mark.covers("F12", "B12", "A20")
@pytest.mark.parametrize(("shape", "keep", "pins", "readers", "unsound", "deleted"), GOLDEN)
def test_golden_plans(
    shape: str, keep: int | None, pins: tuple[int, ...], readers: tuple[int, ...], unsound: dict[int, str], deleted: tuple[int, ...]
) -> None:
    made = plan(KeepLast(keep), log_of(shape), pins=pins, readers=readers, unsound=unsound)
    assert made.doomed == deleted


@pytest.mark.covers("I7", "I1")
@pytest.mark.parametrize(
    ("shape", "log", "out"),
    [
        ("g1 - g3", "u", True),
        ("g1 - g3 g4", "u", True),
        ("g1 - - o0", "u", True),
        ("g1 g2 g3", "u", False),  # brought back from a backup: listed again
        ("g1", "u", False),  # from one before it was written
        ("", "u", False),
        ("g1 - g3", "another", False),  # replaced: it may have taken the directory in
    ],
)
def test_a_record_is_out_of_the_log_only_where_the_same_log_goes_on_without_it(shape: str, log: str, out: bool) -> None:
    following = next((e for e in log_of(shape) if e.index >= 1), None)
    assert still_withdrawn(following, log, 1) is out


@pytest.mark.covers("F13", "A20")
@pytest.mark.parametrize("count", [0, -1])
def test_keeping_none_is_refused_with_the_hint_how_to_keep_all(count: int) -> None:
    with pytest.raises(ConfigError, match="keep=None"):
        KeepLast(count)


@st.composite
def logs(draw: st.DrawFn) -> list[Entry]:
    words, step, generations = [], 0, []
    for index in range(draw(st.integers(1, 12))):
        if generations and draw(st.integers(0, 4)) == 0:
            base = draw(st.sampled_from(generations))
            words.append(f"o{base}")
        else:
            step += draw(st.integers(1, 3))
            words.append(f"g{step}")
            generations.append(index)
    return log_of(" ".join(words))


@pytest.mark.covers("I7", "F9", "F11")
@given(logs(), st.integers(1, 4), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)))
def test_no_plan_leaves_fewer_sound_generations_than_are_to_be_kept(
    entries: list[Entry], keep: int, pins: set[int], readers: set[int], bad: set[int]
) -> None:
    made = plan(KeepLast(keep), entries, pins=pins, readers=readers, unsound=dict.fromkeys(bad, "?"))
    kept = set(made.kept)
    tail = entries[-1]
    sound = [e.index for e in lineage(entries, tail) if e.index not in bad]
    assert len(kept & set(sound)) >= min(keep, len(sound))
    assert set(sound[:keep]) <= kept
    assert (pins | readers) & {v.entry.index for v in made.verdicts} <= kept
    assert tail.kind == "open" or tail.index in kept
    assert tail.kind != "open" or tail.base in kept
    assert all(v.why for v in made.verdicts)

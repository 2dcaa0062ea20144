"""Each checker finds the fault that is planted in a history that is otherwise good, and nothing else finds fault with the good one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from chaos.checkers import ending, log, states
from chaos.checkers.judges import CHECKERS, judge
from chaos.checkers.verdicts import Checker, Verdict, overall
from chaos.evidence import Damage, Evidence, Happened, Line, Poll, Run, Usage, load, store
from ftckpt.data.records import Made, Use
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import Trajectory, genesis

pytestmark = pytest.mark.smoke

JOB = "chaos"
MEMBERS = (member_id("replica0"), member_id("replica1"))
T0 = 1000.0
Change = Callable[[Evidence], Evidence]


def path(steps: int) -> list[Trajectory]:
    """States from genesis on."""
    at = [genesis(JOB)]
    for n in range(steps):
        at.append(at[-1].advance([(m, n + 1) for m in MEMBERS]))
    return at


def entry(index: int, at: Trajectory, **more: object) -> Entry:
    fields = {
        "index": index, "kind": "generation", "log": "u", "step": at.step, "trajectory": at.h, "prev": index - 1, "base": index - 1,
        "attempt": f"{index:08x}", "writer": "replica0", "location": f"s{at.step:09d}-{at.h[:8]}-{index:08x}", "time": T0 + at.step,
    }  # fmt: skip
    return Entry(**{**fields, **more})


def line(kind: str, replica: int, pid: int, at: Trajectory | None = None, when: float = 0.0, **more: object) -> Line:
    fields: dict[str, object] = {"kind": kind, "time": when or T0 + (at.step if at else 0), "pid": pid, "replica": replica, "rank": 0}
    if at is not None:
        fields |= {"step": at.step, "trajectory": at.h, "params": f"p{at.h[:6]}", "optim": f"o{at.h[:6]}"}
    return Line(**{**fields, **more})


def good() -> Evidence:
    """Two replicas, eight steps, generations at 2, 4, 6 and 8; everything dies after step 5, and step 5 is made again."""
    at = path(5)
    again = [*at[:5], at[4].advance([(m, 50) for m in MEMBERS])]
    for n in range(6, 9):
        again.append(again[-1].advance([(m, n) for m in MEMBERS]))
    lines, uses, made = [], [], []
    for r in (0, 1):
        lines += [line("started", r, 10 + r, when=T0 - 2), line("resumed", r, 10 + r, at[0], when=T0 - 1, source="new")]
        lines += [
            line("step", r, 10 + r, a, committed=True, contributed=True, members=2, writer=r == 0, saving=r == 0 and a.step in (2, 4))
            for a in at[1:]
        ]
        lines += [line("started", r, 20 + r, when=T0 + 5.5), line("resumed", r, 20 + r, at[4], when=T0 + 5.6, source="generation", index=1)]
        lines += [
            line("step", r, 20 + r, a, when=T0 + 5 + a.step, committed=True, contributed=True, members=2, writer=r == 0, saving=r == 0 and a.step in (6, 8))
            for a in again[5:]
        ]  # fmt: skip
    for chain, nonces in ((at, {n: n for n in range(1, 6)}), (again[4:], {5: 50, 6: 6, 7: 7, 8: 8})):
        for a, b in pairwise(chain):
            nonce = nonces[b.step]
            made.append(Made(a.h, b.h, b.step, tuple((m, nonce) for m in MEMBERS)))
            uses += [Use(a.h, nonce, m, 0, b.step, (b.step - 1) // 4, (((b.step - 1) % 4) * 2 + i,)) for i, m in enumerate(MEMBERS)]
    entries = (entry(0, at[2]), entry(1, at[4]), entry(2, again[6]), entry(3, again[8]))
    times = (T0 + 2.1, T0 + 4.1, T0 + 11.1, T0 + 13.1)
    return Evidence(
        run=Run(
            workload="torchft", seed=1, job=JOB, replicas=2, ranks=1, save_every=2, patience=60, began=T0 - 5, calm=T0 + 6, ended=T0 + 20,
            statuses={"replica0": 0, "replica1": 0}, origin=at[0].h, log="sqlite",
        ),
        lines=tuple(sorted(lines, key=lambda x: x.time)),
        polls=tuple(Poll(time=t, count=i + 1, fresh=(x,)) for i, (t, x) in enumerate(zip(times, entries, strict=True))),
        entries=entries,
        happened=(Happened(kind="kill-all", time=T0 + 5.2, units=("replica0", "replica1"), pids=(10, 11), machine=True),),
        verified=tuple(Damage(location=x.location, fault="") for x in entries),
        uses=tuple(uses),
        made=tuple(made),
        usage=tuple(Usage(time=T0 + i, pid=10, what="replica0 trainer", rss=1 << 28, fds=20, threads=9) for i in range(30)),
    )  # fmt: skip


def swap(e: Evidence, **fields: object) -> Evidence:
    return msgspec.structs.replace(e, **fields)


def with_entry(e: Evidence, which: int, **fields: object) -> Evidence:
    """The same with one entry changed, in the log and in what was seen of it."""
    new = {x.index: msgspec.structs.replace(x, **fields) if x.index == which else x for x in e.entries}
    polls = tuple(msgspec.structs.replace(p, fresh=tuple(new.get(x.index, x) for x in p.fresh)) for p in e.polls)
    return swap(e, entries=tuple(new.values()), polls=polls)


def with_lines(e: Evidence, change: Callable[[Line], Line | None]) -> Evidence:
    return swap(e, lines=tuple(x for x in map(change, e.lines) if x is not None))


def resumed_at(index: int) -> Change:
    """The second life resumes from an older generation, or (-1) from zero."""
    at = [genesis(JOB), *path(5)[1:]][0 if index < 0 else 2]
    return lambda e: with_lines(
        e, lambda x: msgspec.structs.replace(x, step=at.step, trajectory=at.h) if x.kind == "resumed" and x.pid >= 20 else x
    )


def one_line(kind: str, pid: int, at_step: int, **fields: object) -> Change:
    return lambda e: with_lines(e, lambda x: msgspec.structs.replace(x, **fields) if (x.kind, x.pid, x.step) == (kind, pid, at_step) else x)


def foreign(e: Evidence) -> Evidence:
    """The third generation is built upon what came before step 4: a branch."""
    at = path(3)[3]
    other = at
    made = list(e.made)
    for n in range(4, 7):
        nxt = other.advance([(MEMBERS[0], 900 + n)])
        made.append(Made(other.h, nxt.h, n, ((MEMBERS[0], 900 + n),)))
        other = nxt
    return swap(with_entry(e, 2, trajectory=other.h), made=tuple(made))


def grown(key: str, by: int) -> Change:
    return lambda e: swap(e, usage=tuple(msgspec.structs.replace(u, **{key: getattr(u, key) + by * i}) for i, u in enumerate(e.usage)))


def replayed(e: Evidence) -> Evidence:
    """Member 0 uses the samples of step 6 again in step 7."""
    six = next(u for u in e.uses if u.ordinal == 6 and u.member == MEMBERS[0])
    return swap(e, uses=tuple(msgspec.structs.replace(u, ids=six.ids) if (u.ordinal, u.member) == (7, MEMBERS[0]) else u for u in e.uses))


def skipped(e: Evidence) -> Evidence:
    """Member 1's sample of step 3 is never consumed in epoch 0, though epoch 1 has begun."""
    return swap(e, uses=tuple(msgspec.structs.replace(u, ids=(99,)) if (u.ordinal, u.member) == (3, MEMBERS[1]) else u for u in e.uses))


def rebuilt(e: Evidence) -> Evidence:
    """The same, but that the log of the first two generations was rebuilt before the second life began, after a backup without #1 was put back."""
    polls = [*e.polls[:2], Poll(time=T0 + 5.1, count=1, stale=True), Poll(time=T0 + 5.3, count=2, fresh=e.entries[:2], life=1)]
    polls += [msgspec.structs.replace(p, life=1) for p in e.polls[2:]]
    return swap(e, polls=tuple(polls), happened=(*e.happened, Happened(kind="rebuilt", time=T0 + 5.25)))


def written_to_an_old_log(e: Evidence) -> Evidence:
    e = rebuilt(e)
    wrong = msgspec.structs.replace(e.polls[2], count=2, fresh=(entry(1, path(5)[5]),))
    return swap(e, polls=(*e.polls[:2], wrong, *e.polls[3:]))


def lost_by_rebuilding(e: Evidence) -> Evidence:
    """Generation #0 is in the first log, and not in the rebuilt one."""
    e = rebuilt(e)
    gone = [entry(0, path(5)[4]), *(msgspec.structs.replace(x, index=x.index - 1, prev=x.prev - 1, base=x.base - 1) for x in e.entries[2:])]
    return swap(e, entries=tuple(gone), polls=(*e.polls[:3], Poll(time=T0 + 5.3, count=3, fresh=tuple(gone), life=1)))


PLANTED: list[tuple[str, Checker, Change, str]] = [
    ("a generation vanishes", log.acknowledged, lambda e: swap(e, entries=e.entries[:-1]), "gone"),
    (
        "an entry is rewritten",
        log.acknowledged,
        lambda e: swap(e, entries=(*e.entries[:-1], msgspec.structs.replace(e.entries[-1], bytes=7))),
        "now",
    ),
    (
        "a lost acknowledgement",
        log.acknowledged,
        lambda e: swap(e, lines=(*e.lines, line("acked", 0, 20, path(5)[5], index=1))),
        "was told",
    ),
    ("a write to a log that went back", log.acknowledged, written_to_an_old_log, "had gone back"),
    ("a generation that rebuilding lost", log.acknowledged, lost_by_rebuilding, "before it was rebuilt"),
    ("an older generation after rebuilding", states.restored, lambda e: resumed_at(0)(rebuilt(e)), "though #1"),
    ("two jobs mixed", ending.apart, lambda e: swap(e, foreign=("both jobs have an entry",)), "both jobs"),
    ("the log goes back", log.acknowledged, lambda e: swap(e, polls=(*e.polls, Poll(time=T0 + 14, count=2))), "went back"),
    ("a gap in the log", log.one_chain, lambda e: with_entry(e, 3, index=5, prev=4), "indices"),
    ("two logs", log.one_chain, lambda e: with_entry(e, 3, log="v"), "several logs"),
    ("an attempt twice", log.one_chain, lambda e: with_entry(e, 3, attempt=e.entries[2].attempt), "2 times"),
    ("another predecessor", log.one_chain, lambda e: with_entry(e, 3, prev=1), "is before it"),
    ("a step that does not grow", log.one_chain, lambda e: with_entry(e, 3, step=6), "descends from"),
    ("a branch appended", log.ancestry, foreign, "does not descend"),
    (
        "a generation that rotted",
        log.whole,
        lambda e: swap(e, verified=(Damage(location=e.entries[0].location, fault="x"), *e.verified[1:])),
        ": x",
    ),
    ("a generation without files", log.whole, lambda e: swap(e, verified=e.verified[1:]), "was not found"),
    (
        "damage that is not seen",
        log.whole,
        lambda e: swap(e, happened=(Happened(kind="d", time=T0, location=e.entries[0].location),)),
        "passes",
    ),
    ("a promise broken", log.promised, one_line("step", 10, 5, saving=True, time=T0 + 100), "is not in the log"),
    ("an older generation", states.restored, resumed_at(0), "though #1"),
    ("from zero", states.restored, resumed_at(-1), "from zero"),
    ("a state of nobody", states.restored, one_line("resumed", 20, 4, trajectory="f" * 64), "not in the log"),
    ("other parameters", states.bytes_equal, one_line("resumed", 20, 4, params="x"), "other parameters"),
    ("another optimizer", states.bytes_equal, one_line("resumed", 21, 4, optim="x"), "other optimizer"),
    ("step zero again", states.never_from_zero, resumed_at(-1), "at step 0"),
    ("a committed step made again", states.never_from_zero, one_line("step", 21, 5, step=3), "at step 3"),
    ("replicas that differ", states.replicas_equal, one_line("step", 21, 7, params="x"), "differs between"),
    ("a sample twice", ending.audit, replayed, "more than once"),
    ("a sample skipped", ending.audit, skipped, "skipped"),
    ("an unrecorded part", ending.audit, lambda e: swap(e, uses=tuple(u for u in e.uses if u.ordinal != 7)), "nothing was recorded"),
    ("a hole in the records", ending.audit, lambda e: swap(e, made=tuple(m for m in e.made if m.step != 3)), "reach back"),
    (
        "nothing after the faults",
        ending.commits_again,
        lambda e: swap(e, polls=e.polls[:2], run=msgspec.structs.replace(e.run, ended=T0 + 99)),
        "nothing was committed",
    ),
    (
        "a unit that fails",
        ending.commits_again,
        lambda e: swap(e, run=msgspec.structs.replace(e.run, ended=T0 + 99, statuses={"replica0": 1})),
        "ended with status",
    ),
    (
        "a unit that hangs",
        ending.bounded,
        lambda e: swap(e, happened=(Happened(kind="hung", time=T0, units=("a",), text="joined"),)),
        "silent",
    ),
    ("a process left", ending.nothing_left, lambda e: swap(e, left=("process 7: x",)), "process 7"),
    ("memory that grows", ending.flat, grown("rss", 16 << 20), "rss grew"),
    ("descriptors that grow", ending.flat, grown("fds", 4), "fds grew"),
    ("threads that grow", ending.flat, grown("threads", 2), "threads grew"),
]


def test_a_good_history_is_valid() -> None:
    verdicts = judge(good())
    assert [v for v in verdicts if v.word != "valid"] == []
    assert overall(verdicts) == "valid"


@pytest.mark.parametrize(("checker", "plant", "says"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_found(checker: Checker, plant: Change, says: str) -> None:
    found = checker(plant(good()))
    assert found.word == "invalid"
    assert any(says in p for p in found.problems), found.problems


def test_every_checker_can_fail_or_has_its_own_test() -> None:
    assert {c for c in CHECKERS if c is not ending.enough} == {p[1] for p in PLANTED}


@pytest.mark.parametrize(
    ("checker", "change"),
    [
        (ending.enough, lambda e: swap(e, happened=())),
        (ending.enough, lambda e: swap(e, run=msgspec.structs.replace(e.run, cut_short="time ran out"))),
        (ending.commits_again, lambda e: swap(e, run=msgspec.structs.replace(e.run, calm=0.0))),
        (ending.commits_again, lambda e: swap(e, polls=(), run=msgspec.structs.replace(e.run, ended=T0 + 30))),
        (ending.nothing_left, lambda e: swap(e, left=("process 7",), run=msgspec.structs.replace(e.run, statuses={"replica0": None}))),
        (ending.audit, lambda e: swap(e, entries=())),
    ],
)
def test_what_was_not_seen_is_unknown(checker: Checker, change: Change) -> None:
    assert checker(change(good())).word == "unknown"


def test_a_damaged_newest_generation_excuses_the_one_before_it() -> None:
    e = resumed_at(0)(good())
    hurt = Happened(kind="damage-newest", time=T0 + 5.2, location=e.entries[1].location)
    assert states.restored(swap(e, happened=(hurt,))).word == "valid"


def test_a_save_that_one_rank_of_two_had_not_made_yet_was_not_promised() -> None:
    e = one_line("step", 10, 5, saving=True, time=T0 + 100)(good())
    of_two = swap(e, run=msgspec.structs.replace(e.run, ranks=2))
    other = [msgspec.structs.replace(x, rank=1) for x in of_two.lines]
    assert log.promised(swap(of_two, lines=(*of_two.lines, *other))).word == "invalid"
    other = [msgspec.structs.replace(x, saving=x.saving and x.step != 5) for x in other]
    assert log.promised(swap(of_two, lines=(*of_two.lines, *other))).word == "valid"


def test_an_opening_stands_for_its_base() -> None:
    e = good()
    at = path(4)[4]
    opened = at.open("0000000a")
    opening = entry(2, opened, kind="open", base=1, location="", attempt="0000000a")
    e = swap(e, entries=(*e.entries[:2], opening))
    e = with_lines(e, lambda x: msgspec.structs.replace(x, trajectory=opened.h) if x.kind == "resumed" and x.pid >= 20 else x)
    assert states.restored(e).word == "valid"
    assert states.bytes_equal(e).word == "valid"
    assert states.bytes_equal(one_line("resumed", 20, 4, params="x")(e)).word == "invalid"


def test_a_log_that_was_rebuilt_is_judged_by_what_it_had_before_and_has_now() -> None:
    assert [v for v in judge(rebuilt(good())) if v.word != "valid"] == []


def test_the_worst_word_counts() -> None:
    def of(*words: str) -> list[Verdict]:
        return [Verdict(checker="x", word=w) for w in words]  # type: ignore[arg-type]

    assert overall(of("valid", "unknown")) == "unknown"
    assert overall(of("unknown", "invalid", "valid")) == "invalid"
    assert overall([]) == "unknown"


def test_evidence_can_be_judged_again_from_its_files(tmp_path) -> None:
    e = swap(good(), uses=(), made=())
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "r0-k0.jsonl").write_bytes(b"\n\n".join(map(msgspec.json.encode, e.lines)) + b'\n{"kind": "torn')
    store(tmp_path, e)
    assert load(tmp_path) == e

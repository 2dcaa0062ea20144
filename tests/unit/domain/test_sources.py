"""The recovery ladder, exhaustively where the space is small and with hypothesis where it is large."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt import errors
from ftckpt.domain.choice import AtIndex, AtLocation, AtStep, Choice, Fault, Fresh, Newest, Probe, Refusal, Request, Situation
from ftckpt.domain.doubts import doubt
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import Found, LogView, adoptable, chain_to, lineage
from ftckpt.domain.sources import decide
from ftckpt.domain.trajectory import Trajectory, genesis

LOG = "log-1"


def path(*steps: int, seed: int = 0) -> list[Trajectory]:
    """Trajectories of one history at the given steps."""
    at, out = genesis("gpt"), []
    for step in range(1, max(steps) + 1):
        at = at.advance([(seed, step)])
        if step in steps:
            out.append(at)
    return out


def generation(index: int, t: Trajectory, base: int | None = None) -> Entry:
    return Entry(
        index=index, kind="generation", log=LOG, step=t.step, trajectory=t.h, prev=index - 1, base=index - 1 if base is None else base,
        attempt=f"{index:08x}", writer="r", location=f"dir{index}", manifest="m",
    )  # fmt: skip


def opening(index: int, base: int, t: Trajectory) -> tuple[Entry, Trajectory]:
    after = t.open(f"{index:08x}")
    return Entry(
        index=index, kind="open", log=LOG, step=t.step, trajectory=after.h, prev=index - 1, base=base, attempt=f"{index:08x}", writer="r"
    ), after  # fmt: skip


def view(*entries: Entry, damaged: tuple[tuple[int, str], ...] = ()) -> LogView:
    return LogView(uuid=LOG, tail=entries[-1] if entries else None, entries=entries, damaged=damaged)


def found(t: Trajectory, location: str, *, why: str = "", log: str = LOG, known: int = -1) -> Found:
    return Found(location=location, step=t.step, why=why, trajectory=t, log=log, known_tail=known, manifest="m")


def settle(at: Situation, request: Request, bad: set[str] = frozenset()) -> Choice | Refusal:  # type: ignore[assignment]
    """Answer every probe: a location is sound unless it is in ``bad``."""
    findings: dict[str, Fault | None] = {}
    while isinstance(decision := decide(at, request, findings), Probe):
        assert decision.location not in findings
        findings[decision.location] = Fault("shard", "digest") if decision.location in bad else None
    return decision


def refused(at: Situation, request: Request | None = None, bad: set[str] = frozenset()) -> Refusal:  # type: ignore[assignment]
    decision = settle(at, request or Newest(), bad)
    assert isinstance(decision, Refusal), decision
    return decision


def chosen(at: Situation, request: Request | None = None, bad: set[str] = frozenset()) -> Choice:  # type: ignore[assignment]
    decision = settle(at, request or Newest(), bad)
    assert isinstance(decision, Choice), decision
    return decision


A, B, C, D = path(5, 10, 15, 20)
X = path(5, 12, seed=9)[1]  # another history
THREE = view(generation(0, A), generation(1, B), generation(2, C))


# ---------------------------------------------------------------- I8: never silently from zero
@pytest.mark.covers("I8")
def test_nothing_anywhere_is_a_new_job() -> None:
    choice = chosen(Situation(job="gpt"))
    assert (choice.source, choice.step, choice.opens) == ("new", 0, False)


@pytest.mark.covers("I8", "F26")
@pytest.mark.parametrize("state", ["unreachable", "damaged"])
@pytest.mark.parametrize("request_", [Newest(), AtStep(5), AtIndex(0), AtLocation("dir0")])
def test_a_log_that_cannot_be_read_refuses_and_prints_what_the_root_has(state: str, request_: Request) -> None:
    at = Situation(job="gpt", log=LogView(state=state, reason="no answer"), found=(found(A, "dir0"),))  # type: ignore[arg-type]
    refusal = refused(at, request_)
    assert refusal.kind == ("LogUnreachable" if state == "unreachable" else "Damaged")
    assert "dir0" in str(refusal.error())
    assert "ftckpt log rebuild gpt" in refusal.todo


@pytest.mark.covers("I8", "F26")
@pytest.mark.parametrize("log", ["", "log-0"])
def test_an_empty_log_with_manifests_of_another_log_refuses(log: str) -> None:
    for uuid in ("", LOG):
        refusal = refused(Situation(job="gpt", log=LogView(uuid=uuid), found=(found(A, "dirA", log=log),)))
        assert refusal.kind == "ProgressExists"
        assert "dirA" in str(refusal.error())
        assert "log rebuild gpt" in refusal.todo


@pytest.mark.covers("F7", "I8")
def test_only_incomplete_generations_refuse_and_are_listed() -> None:
    refusal = refused(
        Situation(job="gpt", found=(Found(location="dirA", step=5, why="no manifest"), Found(location="dirB", step=9, why="empty")))
    )
    assert refusal.kind == "NothingLoadable"
    assert refusal.lines == ("dirA: no manifest", "dirB: empty")


@pytest.mark.covers("A16", "I8")
def test_a_seed_at_step_zero_is_no_progress_but_is_taken_when_it_is_in_the_log() -> None:
    seed = genesis("gpt")
    assert chosen(Situation(job="gpt", found=(found(seed, "seed", log="elsewhere"),))).source == "new"
    choice = chosen(Situation(job="gpt", log=view(generation(0, seed))))
    assert (choice.source, choice.step, choice.location) == ("generation", 0, "dir0")


@pytest.mark.covers("I8", "F7")
@pytest.mark.parametrize("log", [LogView(), THREE, LogView(state="unreachable", reason="down"), LogView(state="damaged", reason="bad")])
def test_the_explicit_word_overrides_everything(log: LogView) -> None:
    choice = chosen(Situation(job="gpt", log=log, found=(found(A, "dir0"),)), Fresh())
    assert (choice.source, choice.step, choice.location) == ("fresh", 0, "")
    assert choice.opens == (log.tail is not None or log.state != "ok")


def test_a_job_that_was_started_afresh_goes_on_from_zero_until_it_has_committed() -> None:
    entry, after = opening(3, -1, genesis("gpt"))
    log = view(*THREE.entries, entry)
    assert chosen(Situation(job="gpt", log=log)).source == "new"
    later = generation(4, after.advance([(1, 1)]), base=-1)
    assert chosen(Situation(job="gpt", log=view(*log.entries, later))).location == "dir4"


@pytest.mark.covers("I8", "F26")
def test_a_foreign_log_that_begins_at_zero_does_not_account_for_what_the_root_has() -> None:
    entry, _ = opening(0, -1, genesis("gpt"))
    at = Situation(job="gpt", log=view(entry), found=(found(A, "dirA", log="log-0"), found(B, "dirB", log="")))
    refusal = refused(at)
    assert (refusal.kind, len(refusal.lines)) == ("ProgressExists", 2)
    assert "begins at zero" in refusal.what
    assert doubt(at) == refusal
    assert chosen(at, Fresh()).source == "fresh"
    own = Situation(job="gpt", log=view(entry), found=(found(A, "dirA", why="no manifest"),))
    assert (chosen(own).source, doubt(own)) == ("new", None)


@pytest.mark.covers("I8")
def test_a_start_from_zero_with_the_users_word_leaves_other_logs_generations_behind_for_good() -> None:
    entry, after = opening(0, -1, genesis("gpt"))
    again, _ = opening(1, -1, after)
    told = view(msgspec.structs.replace(entry, fresh=True), again)
    at = Situation(job="gpt", log=told, found=(found(A, "dirA", log="log-0"),))
    assert (chosen(at).source, doubt(at)) == ("new", None)


@pytest.mark.covers("I8", "F26", "F81")
def test_what_speaks_against_a_log_is_said_before_anything_is_verified() -> None:
    complete, part = found(A, "dirA", log="log-0"), Found(location="dirB", step=9, why="no manifest")
    assert doubt(Situation(job="gpt", log=view(), found=(part,))) is None
    assert doubt(Situation(job="gpt", log=THREE, found=(complete,))) is None
    empty = doubt(Situation(job="gpt", log=view(), found=(complete, part)))
    assert empty is not None
    assert (empty.kind, len(empty.lines)) == ("ProgressExists", 1)
    back = doubt(Situation(job="gpt", log=view(generation(0, A)), found=(found(C, "dirC", known=1),)))
    assert back is not None
    assert back.kind == "LogRegressed"


@pytest.mark.covers("F81", "I8")
def test_a_log_that_went_back_refuses_everything_but_a_fresh_start() -> None:
    at = Situation(job="gpt", log=view(generation(0, A)), found=(found(A, "dir0"), found(C, "dirC", known=1)))
    for request in (Newest(), AtStep(5), AtIndex(0)):
        assert refused(at, request).kind == "LogRegressed"
    assert chosen(at, Fresh()).source == "fresh"


@pytest.mark.covers("F81")
def test_positions_in_another_log_say_nothing_about_this_one() -> None:
    at = Situation(job="gpt", log=view(generation(0, A)), found=(found(A, "dir0", log="log-0", known=7),))
    assert chosen(at).location == "dir0"


# ---------------------------------------------------------------- the ladder
@pytest.mark.covers("F25", "F7", "I9")
def test_every_combination_of_damage_takes_the_newest_sound_generation_and_names_the_others() -> None:
    at = Situation(job="gpt", log=THREE)
    for bad in itertools.chain.from_iterable(itertools.combinations(["dir0", "dir1", "dir2"], n) for n in range(4)):
        sound = [i for i in (2, 1, 0) if f"dir{i}" not in bad]
        decision = settle(at, Newest(), set(bad))
        if not sound:
            assert isinstance(decision, Refusal)
            assert decision.kind == "NothingLoadable"
            assert len(decision.lines) == 3
            assert all("shard: digest" in line for line in decision.lines)
            continue
        assert isinstance(decision, Choice)
        assert decision.entry is not None
        assert decision.entry.index == sound[0]
        assert [r.index for r in decision.rejected] == [i for i in (2, 1, 0) if i > sound[0]]
        assert all("shard: digest" in reason for reason in decision.reasons[1:])
        assert decision.opens == (sound[0] != 2)


def test_what_is_asked_for_is_verified_first_and_nothing_else() -> None:
    at = Situation(job="gpt", log=THREE)
    assert decide(at, Newest(), {}) == Probe("dir2", THREE.entries[2])
    assert decide(at, AtStep(5), {}) == Probe("dir0", THREE.entries[0])


def test_an_open_tail_means_its_base_without_opening_again() -> None:
    entry, _ = opening(3, 0, A)
    at = Situation(job="gpt", log=view(*THREE.entries, entry))
    assert (chosen(at).location, chosen(at).opens) == ("dir0", False)
    assert chosen(at, AtStep(15)).opens
    assert refused(at, bad={"dir0"}).kind == "NothingLoadable"  # the abandoned branch is never taken unasked


@pytest.mark.covers("A10", "F27")
@pytest.mark.parametrize(
    ("request_", "wanted"), [(AtStep(123), "step 123"), (AtIndex(9), "generation #9"), (AtLocation("dir9"), "generation dir9")]
)
def test_what_does_not_exist_is_an_error_with_the_steps_that_do(request_: Request, wanted: str) -> None:
    error = refused(Situation(job="gpt", log=THREE), request_).error()
    assert isinstance(error, errors.NotFound)
    assert wanted in error.what
    assert "5, 10, 15" in error.what


@pytest.mark.covers("A10")
@pytest.mark.parametrize("request_", [AtStep(10), AtIndex(1), AtLocation("dir1")])
def test_an_older_generation_that_is_asked_for_opens_a_branch(request_: Request) -> None:
    choice = chosen(Situation(job="gpt", log=THREE), request_)
    assert (choice.location, choice.opens) == ("dir1", True)


@pytest.mark.covers("A10")
def test_the_tail_that_is_asked_for_opens_nothing() -> None:
    assert not chosen(Situation(job="gpt", log=THREE), AtStep(15)).opens


def test_of_two_generations_of_a_step_the_one_on_the_tails_trajectory_is_meant() -> None:
    entry, after = opening(2, 0, A)
    again = after.advance([(3, s) for s in range(5)], step=10)
    at = Situation(job="gpt", log=view(generation(0, A), generation(1, B), entry, generation(3, again)))
    assert chosen(at, AtStep(10)).location == "dir3"
    back, _ = opening(4, 1, B)
    assert chosen(Situation(job="gpt", log=view(*at.log.entries, back)), AtStep(10)).location == "dir1"


@pytest.mark.covers("F25")
def test_a_damaged_generation_that_is_asked_for_is_not_replaced_by_another() -> None:
    refusal = refused(Situation(job="gpt", log=THREE), AtStep(10), {"dir1"})
    assert refusal.kind == "Damaged"
    assert "shard: digest" in refusal.what


def test_a_directory_without_record_is_no_generation_even_when_it_is_asked_for() -> None:
    refusal = refused(Situation(job="gpt", log=THREE, found=(found(X, "dirX"),)), AtLocation("dirX"))
    assert refusal.kind == "NotFound"
    assert any("not in the log" in line for line in refusal.lines)


# ---------------------------------------------------------------- finished generations without record
def test_a_finished_generation_without_record_comes_before_the_tail() -> None:
    at = Situation(job="gpt", log=THREE, found=(found(D, "dirD", known=2),))
    assert (chosen(at).source, chosen(at).location) == ("durable", "dirD")
    assert chosen(at, bad={"dirD"}).location == "dir2"


@pytest.mark.covers("I8")
def test_the_first_generation_may_be_finished_without_record_too() -> None:
    at = Situation(job="gpt", log=LogView(uuid=LOG), found=(found(A, "dirA"),))
    assert chosen(at).source == "durable"


def test_another_branch_is_not_appendable() -> None:
    at = Situation(job="gpt", log=THREE, found=(found(X, "dirX", known=0), found(path(30, seed=9)[0], "dirY", known=0)))
    assert adoptable(at.log, at.found) == ()
    assert chosen(at).location == "dir2"


def test_finished_generations_are_appended_in_order_of_steps() -> None:
    e, f = path(25, 30)
    several = (found(f, "f"), found(D, "d"), found(e, "e"), found(X, "x"))
    assert [g.location for g in adoptable(THREE, several)] == ["d", "e", "f"]


def test_a_chain_holds_ancestors_only() -> None:
    pool = [found(A, "a"), found(B, "b"), found(X, "x"), found(C, "c", why="no manifest"), found(D, "d")]
    assert [f.location for f in chain_to(pool[-1], pool)] == ["a", "b", "d"]


# ---------------------------------------------------------------- ancestry
def test_at_an_unreadable_entry_the_walk_goes_on_at_the_base_of_the_one_after_it() -> None:
    entry, after = opening(3, 0, A)
    late = generation(4, after.advance([(1, 1)]), base=0)
    entries = [*THREE.entries, late]  # 3 cannot be read
    assert [e.index for e in lineage(entries, late, [3])] == [4, 0]
    assert [e.index for e in lineage([generation(0, A), generation(2, C)], generation(2, C), [1])] == [2, 0]
    assert entry.base == 0


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Entry], list[Trajectory]]:
    """A log as the rules let it grow, with its true trajectories."""
    entries: list[Entry] = []
    states: list[Trajectory] = []
    now = genesis("gpt")
    for index in range(draw(st.integers(1, 10))):
        made = [e for e in entries if e.kind == "generation"]
        if made and draw(st.integers(0, 3)) == 0:
            base = draw(st.sampled_from(made))
            entry, now = opening(index, base.index, states[base.index])
        else:
            for _ in range(draw(st.integers(1, 3))):
                now = now.advance([(index, 1)])
            entry = generation(index, now, base=entries[-1].base if entries and entries[-1].kind == "open" else index - 1)
        entries.append(entry)
        states.append(now)
    return entries, states


@pytest.mark.covers("I4")
@given(histories(), st.sets(st.integers(0, 9)))
def test_the_lineage_is_what_the_trajectories_say(history: tuple[list[Entry], list[Trajectory]], withdrawn: set[int]) -> None:
    entries, states = history
    last = max((e.index for e in entries if e.kind == "open"), default=-1)
    keep = [
        e
        for e in entries
        if e.index not in withdrawn
        or e.kind == "open"
        or e.index == entries[-1].index
        or e.index == (entries[last].base if last >= 0 else -1)
    ]
    true = [e.index for e in keep if e.kind == "generation" and states[-1].holds(e.trajectory)]
    assert [e.index for e in lineage(keep, entries[-1])] == true[::-1]


@pytest.mark.covers("I8", "F25")
@given(histories(), st.sets(st.integers(0, 9)))
def test_whatever_is_damaged_the_newest_sound_ancestor_is_taken_and_never_zero(
    history: tuple[list[Entry], list[Trajectory]], broken: set[int]
) -> None:
    entries, states = history
    decision = settle(Situation(job="gpt", log=view(*entries)), Newest(), {f"dir{i}" for i in broken})
    sound = [e for e in entries if e.kind == "generation" and states[-1].holds(e.trajectory) and e.index not in broken]
    if isinstance(decision, Refusal):
        assert not sound
        assert decision.kind == "NothingLoadable"
        return
    assert isinstance(decision, Choice)
    assert decision.source == "generation"
    assert decision.entry == sound[-1]

"""What the simulation is worth: each of these rules, made naive, is found within some hundred schedules by a judge that knows no rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from sim_faults import Act, Plan, act
from sim_world import schedule, simulated

from ftckpt.agent import commit, journal, pipeline, session, small
from ftckpt.agent.assemble import Assemble
from ftckpt.agent.commit import Commit
from ftckpt.agent.jobs import Job, Outcome
from ftckpt.domain import ledger, lineage, retention, vote
from ftckpt.errors import LogAmbiguous, NotFound
from ftckpt.flows import gc, gc_plan, leftovers, select
from ftckpt.format.manifest import MANIFEST, Manifest, Receipt, decode, record
from ftckpt.trainer.replicas import bounds

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.timeout(600)
SEEDS = 400  # at most; most are found within ten


# ---------------------------------------------------------------- worlds in which a fault can show
def solo(*kinds: str, ranks: int = 1, **more: object) -> Callable[[random.Random], Plan]:
    return lambda rng: Plan(ranks=ranks, goal=5, switch=rng.choice((0.05, 0.3, 0.7)), acts=acts(rng, kinds), **more)  # type: ignore[arg-type]


def replicas(*kinds: str, **more: object) -> Callable[[random.Random], Plan]:
    return lambda rng: Plan(torchft=True, replicas=2, goal=5, switch=rng.choice((0.05, 0.3, 0.7)), acts=acts(rng, kinds), **more)  # type: ignore[arg-type]


def acts(rng: random.Random, kinds: Sequence[str]) -> list[Act]:
    return [act(rng, kind) for kind in kinds]


def gone_back(rng: random.Random) -> Plan:
    """The log goes back to before the job was started from an older generation, and the user cleans up before the operator comes."""
    saved = rng.uniform(1.0, 3.0)
    made = Plan(goal=6, switch=0.3, acts=[Act("restore", saved, 0.5 + rng.random() / 2), Act("older", saved + 0.5, rng.random())])
    made.acts += [Act("clean-up", saved + rng.uniform(6.0, 20.0), 0.3 * rng.random()) for _ in range(4)]
    return made


def stood_still(rng: random.Random) -> Plan:
    """Who cleans up stands still, and the log comes back from a backup meanwhile."""
    restore = Act("restore", rng.uniform(1.0, 4.0), rng.random())
    return Plan(goal=6, switch=rng.choice((0.05, 0.3, 0.7)), acts=[restore, *acts(rng, ("stop agent", "stop host", "stop agent"))])


# ---------------------------------------------------------------- rules made naive
def own_attempt_is_not_looked_up(patch: Patch) -> None:
    patch.setattr(commit, "own_entry", lambda entries, attempt: None)


def readers_are_not_drained(patch: Patch) -> None:
    patch.setattr(gc._Work, "_drained", lambda self, entry: True)
    patch.setattr(leftovers, "_withdrawn", lambda log, index: (True, "withdrawn"))


def steps_instead_of_trajectories(tail: ledger.Entry | None, candidate: object) -> object:
    if tail is None or candidate.step > tail.step:  # type: ignore[attr-defined]
        return ledger.Append(-1 if tail is None else tail.index)
    return ledger.Superseded(tail.index)


def a_greater_step_is_enough(patch: Patch) -> None:
    patch.setattr(commit, "judge", steps_instead_of_trajectories)


def adoption_by_step(patch: Patch) -> None:
    patch.setattr(lineage, "judge", steps_instead_of_trajectories)
    patch.setattr(select, "judge", steps_instead_of_trajectories)
    patch.setattr(select, "chain_to", lambda tip, found: (tip,))


def the_record_comes_before_the_manifest(patch: Patch) -> None:
    held: dict[str, bytes] = {}
    whole = Commit.__call__

    def entry(self: Commit, candidate: object) -> object:
        directory, name = candidate.job.directory, candidate.job.name  # type: ignore[attr-defined]
        data = held[f"{directory}/{MANIFEST}"]
        manifest = decode(data, Manifest, MANIFEST)
        return manifest, record(manifest, data, name)

    def call(self: Commit, candidate: object) -> object:
        found = whole(self, candidate)  # type: ignore[arg-type]
        path = f"{candidate.job.directory}/{MANIFEST}"  # type: ignore[attr-defined]
        self._store.put(path, held[path])
        return found

    patch.setattr(Assemble, "_put_manifest", lambda self, path, data: held.__setitem__(path, data))
    patch.setattr(Commit, "_entry", entry)
    patch.setattr(Commit, "__call__", call)


def the_manifest_does_not_wait_for_all_shards(patch: Patch) -> None:
    def receipts(self: Assemble, job: Job) -> list[Receipt]:
        path = f"{job.directory}/receipts/r00000.json"
        return [decode(self._store.get(path), Receipt, path)]

    patch.setattr(Assemble, "_receipts", receipts)
    patch.setattr(Assemble, "_prove", lambda self, job, receipts: None)


def what_is_ambiguous_is_deleted(patch: Patch) -> None:
    tried = Commit._try

    def give_up(self: Commit, *given: object) -> Outcome:
        try:
            return tried(self, *given)  # type: ignore[arg-type]
        except LogAmbiguous:
            return Outcome(state="failed", error=("SaveFailed", "no answer", "", ""))

    patch.setattr(Commit, "_try", give_up)


def a_log_that_went_back_is_trusted(patch: Patch) -> None:
    patch.setattr(gc_plan, "_check_current", lambda store, job, names, seen: None)
    patch.setattr(gc_plan, "_check_mark", lambda store, job, name, uuid, last: None)


def files_go_before_the_record(patch: Patch) -> None:
    withdraw = gc._Work._withdraw

    def removed_first(self: gc._Work, entry: ledger.Entry) -> None:
        self._store.remove_tree(self._path(entry))
        withdraw(self, entry)

    patch.setattr(gc._Work, "_withdraw", removed_first)


def branches_count_as_kept(patch: Patch) -> None:
    patch.setattr(retention, "lineage", lambda entries, tail: [e for e in reversed(entries) if e.kind == "generation"])


def the_tail_is_not_looked_at(patch: Patch) -> None:
    real = bounds.stand
    patch.setattr(bounds, "stand", lambda t, r, s, q: real(t, r, s, q) if q.blank or q.heal_failed else vote.Stance(True))
    patch.setattr(vote, "tail_word", lambda tail, state: 0)


def equal_steps_are_equal_states(patch: Patch) -> None:
    patch.setattr(vote, "decide", lambda slots, **_: vote.Decision(True))


def nobody_gives_up(patch: Patch) -> None:
    real = vote.decide
    patch.setattr(vote, "decide", lambda slots, **given: vote.Decision((d := real(slots, **given)).agree, vote.Act.KEEP, d.reason))


def a_start_does_not_wait_for_its_agent(patch: Patch) -> None:
    def own_only(self: session.Session) -> None:
        if self._drains and not any(s == self.number for s, _ in self._pipeline.desk.flight()):
            whole(self, self._pipeline)

    def whole(one: session.Session, pipeline: object) -> None:
        drains, one._drains = one._drains, []
        for drain in drains:
            one.channel.post(session.m.Drained(token=drain.token, failed=0))

    patch.setattr(session.Session, "answer_drains", own_only)


def rubbish_needs_its_intent(patch: Patch) -> None:
    real = pipeline.Pipeline._is_rubbish

    def strict(self: pipeline.Pipeline, item: object) -> bool:
        if not self._store.exists(f"{item.job.directory}/attempt.json"):  # type: ignore[attr-defined]
            raise NotFound("no attempt.json")
        return real(self, item)  # type: ignore[arg-type]

    patch.setattr(pipeline.Pipeline, "_is_rubbish", strict)
    patch.setattr(leftovers, "_signed", lambda store, path, job, name: None)
    patch.setattr(leftovers, "_given_up", lambda store, path, job, name: None)
    patch.setattr(small.SmallFiles, "wait", lambda self: self._done.result())


def a_removal_does_not_look_once_more(patch: Patch) -> None:
    patch.setattr(gc, "is_withdrawn", lambda log, uuid, index: True)
    patch.setattr(gc, "reaches", lambda log, uuid, index: True)


def the_journal_gives_its_newest(patch: Patch) -> None:
    def newest(self: journal.Journal, count: int) -> tuple[int, bytes] | None:
        return (self._ordinals[-1], self._states[self._ordinals[-1]]) if self._ordinals else None

    patch.setattr(journal.Journal, "recall", newest)


@contextmanager
def planted(patch: Patch, naive: Callable[[Patch], None] | None) -> Iterator[None]:
    with simulated(), patch.context() as within:
        if naive is not None:
            naive(within)
        yield


CASES = [
    (own_attempt_is_not_looked_up, solo("lost answers", "lost answers"), {"LISTED", "DENIED", "WHOLE"}),
    (readers_are_not_drained, solo("reader", "reader"), {"READ"}),
    (a_greater_step_is_enough, solo("zombie"), {"CHAIN"}),
    (adoption_by_step, solo("zombie", "log down", "kill trainers"), {"CHAIN"}),
    (the_record_comes_before_the_manifest, solo("kill agent"), {"WHOLE"}),
    (the_manifest_does_not_wait_for_all_shards, solo("kill agent", ranks=2), {"WHOLE"}),
    (what_is_ambiguous_is_deleted, solo("lost answers", "lost answers"), {"LISTED", "WHOLE"}),
    (a_log_that_went_back_is_trusted, gone_back, {"LOST", "FEWER", "ORDER"}),
    (files_go_before_the_record, solo("clean-up"), {"LISTED"}),
    (branches_count_as_kept, solo("older", "older"), {"FEWER"}),
    (the_tail_is_not_looked_at, replicas("kill all", "kill host", "stop host"), {"ZERO", "CHAIN", "RESTORED"}),
    (equal_steps_are_equal_states, replicas(*["stop trainers"] * 4, late=0.4, every=5), {"MIXED", "TWIN", "CHAIN"}),
    (nobody_gives_up, replicas(*["stop trainers"] * 4, late=0.4, every=5), {"STUCK"}),
    (a_start_does_not_wait_for_its_agent, solo("stop agent", "kill trainers", slow=0.3), {"PROMISE"}),
    (rubbish_needs_its_intent, solo("zombie", "cut agent"), {"RUBBISH"}),
    (a_removal_does_not_look_once_more, stood_still, {"LISTED", "LOST"}),
    (the_journal_gives_its_newest, solo("kill trainers"), {"ONCE"}),
]


@pytest.mark.parametrize(("naive", "world", "kinds"), CASES, ids=[c[0].__name__ for c in CASES])
def test_a_naive_rule_is_found(
    monkeypatch: Patch, naive: Callable[[Patch], None], world: Callable[[random.Random], Plan], kinds: set[str]
) -> None:
    with planted(monkeypatch, naive):
        for seed in range(SEEDS):
            found = schedule(seed, world(random.Random(seed))).judge.problems
            if {p.kind for p in found} & kinds:
                return
    raise AssertionError(f"not found in {SEEDS} schedules")


@pytest.mark.parametrize(("world", "kinds"), [c[1:] for c in CASES], ids=[c[0].__name__ for c in CASES])
def test_the_real_rule_is_not_blamed_in_such_worlds(monkeypatch: Patch, world: Callable[[random.Random], Plan], kinds: set[str]) -> None:
    with planted(monkeypatch, None):
        for seed in range(25):
            found = schedule(seed, world(random.Random(seed))).judge.problems
            assert not found, f"seed {seed}: {found}"

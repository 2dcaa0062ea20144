"""The commit protocol in every small world: the real rules hold, and each naive rule is caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from model_explore import Walk, walk
from model_world import Budget, Rules

from ftckpt.domain import ledger, vote
from ftckpt.trainer.replicas import bounds

pytestmark = pytest.mark.timeout(300)


def told(result: Walk) -> str:
    return "\n".join(line for way in result.found.values() for line in way)


@pytest.mark.covers("I2", "I3", "I8", "I12", "F61", "F67", "F68")
@pytest.mark.parametrize(
    ("rules", "budget", "live_every"),
    [
        pytest.param(Rules(), Budget(crash=1, partial=1), 20, id="crash-and-partial-commit"),
        pytest.param(Rules(), Budget(pause=1, partial=1), 10, id="zombie-and-partial-commit"),
        pytest.param(Rules(), Budget(lost=2, partial=1), 10, id="lost-and-late-answers"),
        pytest.param(Rules(), Budget(heal=1, down=1, crash=1), 10, id="failing-heals-and-log-down"),
        pytest.param(Rules(warm=False), Budget(crash=1), 20, id="cold-start"),
    ],
)
def test_the_rules_hold_in_all_small_worlds(rules: Rules, budget: Budget, live_every: int) -> None:
    result = walk(rules, budget, seconds=60, live_every=live_every)
    assert result.whole
    assert not result.found, told(result)


@pytest.mark.slow
@pytest.mark.covers("I2", "I3", "I8", "I12", "F59")
@pytest.mark.parametrize(
    ("rules", "budget"),
    [
        pytest.param(Rules(replicas=3), Budget(crash=1, partial=1), id="three-replicas"),
        pytest.param(Rules(split=True), Budget(crash=1, partial=1), id="split-brain"),
        pytest.param(Rules(), Budget(crash=1, pause=1, partial=1, lost=1), id="all-faults"),
        pytest.param(Rules(warm=False, split=True), Budget(crash=2), id="cold-split"),
        pytest.param(Rules(replicas=3, split=True), Budget(partial=1), id="three-split"),
    ],
)
def test_the_rules_hold_in_larger_worlds_as_far_as_time_allows(rules: Rules, budget: Budget) -> None:
    result = walk(rules, budget, seconds=40)
    assert result.worlds > 20_000
    assert not result.found, told(result)


def agree_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vote, "decide", lambda slots, **_: vote.Decision(True))


def never_look_at_the_tail(patch: pytest.MonkeyPatch) -> None:
    real = bounds.stand
    patch.setattr(bounds, "stand", lambda t, r, s, q: real(t, r, s, q) if q.blank or q.heal_failed else vote.Stance(True))
    patch.setattr(vote, "tail_word", lambda tail, state: 0)


def compare_only_steps(patch: pytest.MonkeyPatch) -> None:
    def naive(tail: ledger.Entry | None, candidate: object) -> object:
        if tail is None or candidate.step > tail.step:  # type: ignore[attr-defined]
            return ledger.Append(-1 if tail is None else tail.index)
        return ledger.Superseded(tail.index)

    patch.setattr(ledger, "judge", naive)


def never_give_up(patch: pytest.MonkeyPatch) -> None:
    real = vote.decide

    def naive(slots: list[vote.Slot], **given: object) -> vote.Decision:
        decision = real(slots, **given)  # type: ignore[arg-type]
        return vote.Decision(decision.agree, vote.Act.KEEP, decision.reason)

    patch.setattr(vote, "decide", naive)


@pytest.mark.parametrize(
    ("naive", "rules", "budget", "kind"),
    [
        pytest.param(agree_always, Rules(), Budget(pause=1, partial=1), "MIXED", id="equal-steps-are-equal-states"),
        pytest.param(agree_always, Rules(), Budget(pause=1, partial=1), "ONCE", id="equal-steps-share-counts"),
        pytest.param(never_look_at_the_tail, Rules(), Budget(crash=2), "ZERO", id="no-first-vote-guard"),
        pytest.param(compare_only_steps, Rules(), Budget(pause=1, partial=1), "CHAIN", id="greater-step-is-enough"),
        pytest.param(never_give_up, Rules(), Budget(pause=1, partial=1), "STUCK", id="nobody-gives-up"),
        pytest.param(None, Rules(own_attempt_first=False), Budget(lost=1), "DENIED", id="own-attempt-not-looked-up"),
    ],
)
def test_each_naive_rule_is_caught(
    monkeypatch: pytest.MonkeyPatch, naive: Callable[[pytest.MonkeyPatch], None] | None, rules: Rules, budget: Budget, kind: str
) -> None:
    if naive is not None:
        naive(monkeypatch)
    result = walk(rules, budget, seconds=30, live_every=3 if kind == "STUCK" else 0, wanted=kind)
    assert kind in result.found, f"{result.worlds} worlds, found {list(result.found)}"

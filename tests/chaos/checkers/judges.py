"""All checkers, in the order in which a reader wants to see them."""

from __future__ import annotations

from chaos.checkers import ending, log, states
from chaos.checkers.verdicts import Checker, Verdict
from chaos.evidence import Evidence

CHECKERS: tuple[Checker, ...] = (
    ending.enough,
    log.acknowledged,
    log.one_chain,
    log.ancestry,
    log.whole,
    log.promised,
    states.restored,
    states.bytes_equal,
    states.never_from_zero,
    states.replicas_equal,
    ending.audit,
    ending.commits_again,
    ending.bounded,
    ending.nothing_left,
    ending.apart,
    ending.flat,
)


def judge(e: Evidence) -> list[Verdict]:
    """Every checker's word."""
    return [check(e) for check in CHECKERS]

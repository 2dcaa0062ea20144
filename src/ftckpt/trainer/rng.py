"""Random number streams of this process as plain values, and streams derived for a joiner; never pickled."""

from __future__ import annotations


def capture_rng() -> dict[str, object]:
    """The streams of python, NumPy, torch on the CPU and on each accelerator, as values that ``format.leaves`` encodes."""
    raise NotImplementedError


def restore_rng(value: dict[str, object]) -> list[str]:
    """Set the streams. Call it last.

    Returns:
        What could not be set (a stored accelerator that this process lacks), one sentence each.

    Raises:
        Damaged: not such a value; nothing was changed.
    """
    raise NotImplementedError


def derive_rng(seed: int, replica: str, rank: int, step: int) -> None:
    """Seed every stream from (job seed, replica, rank, step): for a rank that has no cursor of its own."""
    raise NotImplementedError

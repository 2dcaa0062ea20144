"""What is true of a copy at its target, be it another root or the durable tier: sound, or in the way of something else. Only reads."""

from __future__ import annotations

from ftckpt.domain.ledger import Entry
from ftckpt.errors import Occupied, StoreError
from ftckpt.flows.verify import verify
from ftckpt.ports import BlobStore


def check_copy(
    target: BlobStore,
    job: str,
    location: str,
    step: int,
    entry: Entry | None = None,
    *,
    full: bool = False,
    threads: int = 1,
    now: str,
    todo: str,
) -> None:
    """Verify a copy where it was brought.

    Args:
        step: for the message.
        entry: its record; with it the manifest's sha256 is compared.
        full: every byte, else sizes, headers and small files.
        now, todo: what is true, and what to do, if it does not verify.

    Raises:
        StoreError: it does not.
    """
    fault = verify(target, job, location, entry, full=full, threads=threads).fault
    if fault is not None:
        raise StoreError(f"the copy of step {step} in {target.url} does not verify: {fault.part}: {fault.reason}", now=now, todo=todo)


def occupied(target: BlobStore, path: str, todo: str) -> Occupied:
    """The error for a path at which the target has something else."""
    return Occupied(f"{target.url}/{path} exists already and is something else", now="it was not changed", todo=todo)

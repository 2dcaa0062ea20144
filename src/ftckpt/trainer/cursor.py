"""One replica rank's own state as a typed tree: loader position, RNG streams, per-replica states; never a peer's."""

from __future__ import annotations

from ftckpt.trainer.states import StateRegistry


def capture_cursor(registry: StateRegistry, loader_state: object | None) -> bytes:
    """The ``Cursor.state`` document of this rank, as JSON bytes.

    Args:
        registry: its states of scope "replica" are included.
        loader_state: the loader's ``state_dict()`` value, or ``None``.

    Raises:
        Unstorable: names the key.
    """
    raise NotImplementedError


def restore_cursor(doc: bytes, registry: StateRegistry, *, rng: bool = True) -> object | None:
    """Load per-replica states in place, then, last of all, the RNG streams.

    Args:
        doc: ``Cursor.state`` as JSON bytes.
        registry: live objects.
        rng: whether to set the RNG streams.

    Returns:
        The loader's state, for the caller to apply (applying may draw random numbers: then pass ``rng=False`` and call
        ``restore_cursor_rng`` afterwards).

    Raises:
        Mismatch: a per-replica state is missing from the document.
        Damaged: not such a document.
    """
    raise NotImplementedError


def restore_cursor_rng(doc: bytes) -> list[str]:
    """Only the RNG streams of a cursor; the last thing of a resume. Returns what could not be set."""
    raise NotImplementedError

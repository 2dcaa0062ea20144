"""A rank's cursor back into its own states, as a resume does it, without a generation around it."""

from __future__ import annotations

from ftckpt.trainer.cursor import decode_value, parse_cursor, restore_cursor_rng
from ftckpt.trainer.own import Own
from ftckpt.trainer.restore import restore


def restore_cursor(doc, registry, *, rng=True, **options):
    """Returns the loader's state, if it has one."""
    own = Own(doc)
    restore(registry, [], {}, {}, only=(), own=own, **options)
    if rng:
        restore_cursor_rng(doc)
    cursor = parse_cursor(doc)
    return decode_value(cursor["loader"]) if "loader" in cursor else None

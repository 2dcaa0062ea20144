"""Steps that wrappers put into the names of other people's files, and when a file is read without them. Pure; reads no file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ftckpt.trainer.naming import clean_key

_PARALLEL = "module."  # what DDP and DataParallel put before every name


def unwrapped(names: Iterable[str], asked: Callable[[Mapping[str, str]], Collection[str]] | None) -> dict[str, str]:
    """Names to read a file under -> its own ones, as a registered module of the same wrapping has them.

    ``_orig_mod`` and ``_checkpoint_wrapped_module`` go wherever they stand, ``module.`` where all names begin with it. Nothing goes where a name
    with such a step is asked for as it is, where none is asked for without it, or where two names would become one.

    Args:
        names: of the file.
        asked: says, of names that the file could have, which are wanted; None: whatever it has.
    """
    same = {name: name for name in names}
    views = list(_views(same))
    if asked is None:
        return views[-1] if views else same
    changed = {theirs for view in views for name, theirs in view.items() if name != theirs}
    if changed.isdisjoint(asked(same) if changed else ()):
        for view in views:
            if any(view.get(name, name) != name for name in asked(view)):
                return view
    return same


def said(names: Mapping[str, str]) -> list[str]:
    """For a report: that a file is read under other names than its own (see ``unwrapped``)."""
    changed = [(name, theirs) for name, theirs in names.items() if name != theirs]
    return [f"{len(changed)} names are without what wrappers added to them: {changed[0][1]} is {changed[0][0]}"] if changed else []


def _views(same: dict[str, str]) -> Iterator[dict[str, str]]:
    """Other names for all of a file, the nearest to its own first."""
    view = {clean_key(name): name for name in same}
    if len(view) != len(same) or "" in view:
        return
    if view != same:
        yield view
    if view and all(name.startswith(_PARALLEL) and name != _PARALLEL for name in view):
        yield {name.removeprefix(_PARALLEL): theirs for name, theirs in view.items()}

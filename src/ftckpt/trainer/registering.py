"""Registers one object, as a state or as the job's loader, with the options that it takes. Must not look into it."""

from __future__ import annotations

from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.trainer.loaders import Loaders, is_loader
from ftckpt.trainer.states import Scope, StateRegistry, check_name


def add(
    registry: StateRegistry, loaders: Loaders, name: str, obj: Any, *, kind: Any, scope: Scope, only_trainable: bool, cursor: bool
) -> None:
    """See ``Checkpointer.add``.

    Raises:
        ConfigError: the name is taken or unusable, the object is of no known kind, or an option is none of its kind.
    """
    check_name(name)
    if name in registry or name == loaders.name:
        what = "state" if name in registry else "loader"
        raise ConfigError(f"{what} {name!r} is registered already", now="the first one stays registered", todo="give it another name")
    loads = kind == "loader" or (kind == "auto" and scope == "shared" and is_loader(obj))
    told = {"scope": scope != "shared", "only_trainable": only_trainable} if loads else {"cursor": not cursor}
    if strange := [option for option, said in told.items() if said]:
        raise ConfigError(
            f"{name!r} is a {'loader' if loads else 'state and no loader'}, which takes no {' and no '.join(strange)}",
            now="nothing was changed",
            todo=f"leave out {' and '.join(strange)}"
            + ("; a loader's position is each rank's own" if loads else ', or say kind="loader" of an iterable of batches'),
        )
    if loads:
        loaders.add(name, obj, cursor=cursor)
    else:
        registry.add(name, obj, kind=kind, scope=scope, only_trainable=only_trainable)

"""The commit log's backends: one meaning (``base``) over memory, SQLite and etcd; decides nothing (that is domain/ledger).

Importing the package loads no client library; each backend is a module of its own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftckpt.commitlog.etcd import EtcdLog
    from ftckpt.commitlog.memory import MemoryLog
    from ftckpt.commitlog.sqlite import SqliteLog

__all__ = ["EtcdLog", "MemoryLog", "SqliteLog"]

_HOMES = {"EtcdLog": "etcd", "MemoryLog": "memory", "SqliteLog": "sqlite"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"ftckpt.commitlog.{_HOMES[name]}"), name)

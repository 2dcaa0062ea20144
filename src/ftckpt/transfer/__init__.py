"""Bytes between agents: immutable snapshots over signed HTTP, verified on arrival. Never imports torch, never unpickles."""

from ftckpt.transfer.client import Fetched, Patience, Progress, fetch
from ftckpt.transfer.document import SnapshotDoc, SnapshotLine
from ftckpt.transfer.listener import ServerLimits
from ftckpt.transfer.server import SnapshotServer

__all__ = ["Fetched", "Patience", "Progress", "ServerLimits", "SnapshotDoc", "SnapshotLine", "SnapshotServer", "fetch"]

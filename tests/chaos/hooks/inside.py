"""Faults from inside a job's processes, by orders in files: death at a named point, a failing or slow disk, a clock that jumps.

The project's code knows nothing of this: functions are wrapped when their modules are imported, in the job's processes only.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

WRITES = frozenset({"pwrite", "allocate", "fsync", "rename", "rename_new", "link", "unlink", "mkdir", "rmdir"})
LOOK_S = 0.2  # how often a file with a fault is looked for
MARK = "FTCKPT_CHAOS_UNIT"

_folder = Path()
_real_time = time.time
_inside = threading.local()
_dice = random.Random()


# ---------------------------------------------------------------- death at a point
def reached(point: str) -> None:
    """Die here, if that is ordered: of this unit, or of whichever comes to the point first."""
    for folder in (_folder, _folder.parent):
        path = folder / "order.json"
        try:
            order = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if order["point"] != point:
            continue
        taken = folder / f"taken-{order['number']}"
        try:
            os.rename(path, taken)  # one process takes it
        except OSError:
            continue
        if order["after"] > 0:
            threading.Timer(order["after"], _die, (taken, order["victim"])).start()
        else:
            _die(taken, order["victim"])


def _die(taken: Path, victim: str) -> None:
    own = os.getpid()
    pids = [own] if victim == "self" else [p for p in _unit() if p != own and (victim == "machine" or not _is_agent(p))] + [own]
    told = taken.with_suffix(".new")
    told.write_text(json.dumps({"unit": _folder.name, "pids": pids, "agents": any(map(_is_agent, pids))}))
    told.rename(taken.with_suffix(".victims"))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            if pid == own and number == signal.SIGSTOP:
                continue
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _unit() -> list[int]:
    """Processes of this process's unit."""
    want, found = f"{MARK}={os.environ[MARK]}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if want in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return sorted(found)


def _is_agent(pid: int) -> bool:
    try:
        return b"ftckpt.agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _after(owner: Any, name: str, point: str, when: Callable[[Any], bool] = lambda result: True) -> None:
    _wrap(owner, name, lambda: None, lambda result: reached(point) if when(result) else None)


def _wrap(owner: Any, name: str, before: Callable[[], object], after: Callable[[Any], object]) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **more: Any) -> Any:
        before()
        result = inner(*args, **more)
        after(result)
        return result

    outer.__name__ = name
    setattr(owner, name, outer)


def _local_files(module: Any) -> None:
    """Of a shard only: small files are put by the same calls."""
    commit, sync, place = module.LocalWriter.commit, module.Draft.sync, module.Draft.place

    def outer(self: Any) -> None:
        _inside.shard = True
        try:
            commit(self)
        finally:
            _inside.shard = False

    def synced(self: Any) -> None:
        sync(self)
        if getattr(_inside, "shard", False):
            reached("shard-fsync")

    def placed(self: Any, target: str, *, new: bool) -> bool:
        done = bool(place(self, target, new=new))
        if getattr(_inside, "shard", False):
            reached("rename")
        return done

    module.LocalWriter.commit, module.Draft.sync, module.Draft.place = outer, synced, placed


def _log(module: Any) -> None:
    """While an append is under way: the order's delay decides whether the transaction has left, arrived, or been answered."""
    _wrap(module.KeyValueLog, "append", lambda: reached("commit-sent"), lambda entry: reached("commit-answered"))


def _link(module: Any) -> None:
    _wrap(module.AgentClient, "save", lambda: reached("capture"), lambda handle: reached("handed-over"))


def _manager(module: Any) -> None:
    apply = module.FtManager._apply_pending_state_dict

    def applied(self: Any) -> None:
        pending = vars(self).get("_pending_state_dict") is not None
        apply(self)
        if pending:
            reached("heal-applied")

    module.FtManager._apply_pending_state_dict = applied


# ---------------------------------------------------------------- the disk
class _Disk:
    """What the disk does now, as a file says."""

    def __init__(self) -> None:
        self.looked, self.fault = -1.0, None

    def now(self) -> dict[str, Any] | None:
        at = time.monotonic()
        if at - self.looked > LOOK_S:
            self.looked = at
            try:
                self.fault = json.loads((_folder.parent / "disk.json").read_bytes())
            except (OSError, ValueError):
                self.fault = None
        return self.fault


_disk = _Disk()


def _posix(module: Any) -> None:
    call = module.PosixOps.call

    def outer(self: Any, op: str, function: Callable[..., Any], *args: Any) -> Any:
        fault = _disk.now()
        writes = op in WRITES or (op == "open" and args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
        if fault is not None and (writes or (op == "preadv" and fault["kind"] != "readonly")):
            if fault["kind"] == "slow":
                time.sleep(_dice.uniform(0, fault["most"]))
            elif fault["kind"] == "readonly":
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            elif _dice.random() < fault["share"]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(self, op, function, *args)

    module.PosixOps.call = outer


# ---------------------------------------------------------------- the clock
class _Clock:
    """The wall clock as Python code sees it, moved by what a file says."""

    def __init__(self) -> None:
        self.looked, self.shift = -1.0, 0.0

    def time(self) -> float:
        at = time.monotonic()
        if at - self.looked > LOOK_S:
            self.looked = at
            try:
                self.shift = float((_folder / "clock").read_text())
            except (OSError, ValueError):
                self.shift = 0.0
        return _real_time() + self.shift


# ---------------------------------------------------------------- wrapping at import
PATCHES: dict[str, Callable[[Any], None]] = {
    "ftckpt.stores.localfiles": _local_files,
    "ftckpt.stores.posix": _posix,
    "ftckpt.agent.assemble": lambda m: _after(m.Assemble, "_put_manifest", "manifest"),
    "ftckpt.commitlog.base": _log,
    "ftckpt.link.client": _link,
    "ftckpt.trainer.resuming": lambda m: _after(m, "choose", "tail-seen"),
    "ftckpt.trainer.healing": lambda m: _after(m.HealCarrier, "fetch", "heal-received"),
    "ftckpt.trainer.replicas.manager": _manager,
    "torchft.manager": lambda m: _after(m.Manager, "should_commit", "vote", bool),
}


class _Patched(Loader):
    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        PATCHES[self.name](module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Patched(spec.loader, name)
                return spec
        return None


def install(folder: str) -> None:
    """Begin to listen to a folder's orders."""
    global _folder
    _folder = Path(folder)
    _dice.seed(f"{folder} {os.getpid()}")
    time.time = _Clock().time
    sys.meta_path.insert(0, _Finder())

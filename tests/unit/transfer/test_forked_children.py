"""A worker that is forked while bytes arrive, from another process's memory or from a file, holds none of them: neither mapping nor descriptor."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.shm.mapping import HUGE_PAGE, Mapping
from ftckpt.shm.near import here, open_near
from ftckpt.stores.local import LocalStore
from proc import open_files

NAME = "read-while-forked"


def held_by_a_child(of: Callable[[str], bool]) -> tuple[bool, bool]:
    """Whether a child that is forked now has something of that name mapped, and whether it has a descriptor of it."""
    child = os.fork()
    if child == 0:
        mapped = of(Path("/proc/self/maps").read_text())
        os._exit(mapped + 2 * any(map(of, open_files().values())))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in range(4)
    return bool(code & 1), bool(code & 2)


def named(text: str) -> bool:
    return NAME in text


@pytest.mark.covers("I11", "F70")
@pytest.mark.parametrize("size", [3 << 12, HUGE_PAGE + (5 << 12)])
def test_memory_of_another_process_that_is_being_read_is_not_inherited(size: int) -> None:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, b"there", 1 << 12)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        region = open_near(here(fd, 1 << 12), size - (1 << 12))
    finally:
        os.close(fd)  # what is left of it here is what reading it holds
    assert region is not None
    assert named(Path("/proc/self/maps").read_text())
    assert held_by_a_child(named) == (False, False)
    room = bytearray(5)
    region.copy(0, memoryview(room))
    assert room == b"there"
    region.close()
    assert not named(Path("/proc/self/maps").read_text())


@pytest.mark.covers("I11", "F70")
def test_a_stored_file_that_is_being_read_is_not_inherited(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.put(NAME, b"stored" * 1000)
    with store.reader(NAME) as reader:
        view = reader.view()
        assert view is not None
        assert named(Path("/proc/self/maps").read_text())
        assert held_by_a_child(named) == (False, False)
        room = bytearray(6)
        reader.read_into(6, memoryview(room))
        assert room == b"stored" == view[:6]
    assert bytes(view[-6:]) == b"stored"  # mapped as long as it is looked at
    del view
    assert not named(Path("/proc/self/maps").read_text())
    store.close()


@pytest.mark.covers("I11", "F70")
def test_a_child_unmaps_nothing_of_what_was_mapped_when_it_was_forked() -> None:
    mapping = Mapping(-1, 1 << 12, writable=True)
    view, address = mapping.view(), mapping.address
    mapping.close()  # only a view is left of it
    child = os.fork()
    if child == 0:
        import ctypes
        import mmap

        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, *(ctypes.c_size_t,) * 5)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
        libc.mmap(address, 1 << 12, mmap.PROT_READ | mmap.PROT_WRITE, flags, ctypes.c_size_t(-1).value, 0)
        ctypes.memmove(address, b"the child's", 11)
        del view
        os._exit(0 if ctypes.string_at(address, 11) == b"the child's" else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    view[:2] = b"ok"

"""Arenas: sealed, shared, of fixed size, nothing left in forked children."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from pathlib import Path

import pytest

from ftckpt.errors import AgentError, ConfigError
from ftckpt.link.arena import Arena
from ftckpt.link.budget import Budget, available_memory, check_budget


def test_what_the_trainer_writes_the_agent_reads() -> None:
    trainer = Arena.create(2, 5000)
    agent = Arena.attach(os.dup(trainer.fd), 2, 5000)
    trainer.slot(1)[:] = b"\7" * 5000
    assert bytes(agent.slot(1)) == b"\7" * 5000
    assert bytes(agent.slot(0)) == bytes(5000)
    trainer.close()
    agent.close()


def test_agent_cannot_write() -> None:
    trainer = Arena.create(1, 100)
    agent = Arena.attach(os.dup(trainer.fd), 1, 100)
    with pytest.raises(TypeError):
        agent.slot(0)[0] = 1
    trainer.close()
    agent.close()


def test_size_is_sealed() -> None:
    arena = Arena.create(1, 10_000)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    arena.close()


@pytest.mark.parametrize("slot_bytes", [1, 4095, 4096, 4097, 100_001])
def test_slots_begin_on_pages_and_do_not_overlap(slot_bytes: int) -> None:
    import ctypes

    arena = Arena.create(3, slot_bytes)
    addresses = []
    for index in range(3):
        view = (ctypes.c_char * slot_bytes).from_buffer(arena.slot(index))
        addresses.append(ctypes.addressof(view))
        del view
    assert all(a % mmap.PAGESIZE == 0 for a in addresses)
    assert all(b - a >= slot_bytes for a, b in itertools.pairwise(addresses))
    arena.close()


@pytest.mark.covers("I10")
@pytest.mark.parametrize("kind", ["unsealed", "small"])
def test_descriptor_that_is_not_a_sealed_arena_is_refused_and_closed(kind: str) -> None:
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096 if kind == "small" else 8192)
    if kind == "small":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(AgentError, match="arena refused"):
        Arena.attach(fd, 1, 8192)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_prefault_touches_every_page_and_keeps_what_is_there() -> None:
    arena = Arena.create(2, 20 << 20)
    arena.slot(0)[:4] = b"kept"
    arena.prefault(background=False)
    assert _mapped_kb("Rss") * 1024 >= 40 << 20
    assert bytes(arena.slot(0)[:4]) == b"kept"
    arena.close()


def test_prefault_takes_huge_pages_where_the_kernel_gives_them_and_keeps_what_is_there() -> None:
    if not _kernel_collapses():
        pytest.skip("this kernel does not put shared pages together")
    arena = Arena.create(2, (9 << 20) + 5000)
    arena.slot(0)[:4] = b"kept"
    arena.slot(1)[-4:] = b"last"
    arena.prefault(background=False)
    assert _mapped_kb("ShmemPmdMapped") * 1024 >= 16 << 20
    assert _mapped_kb("Rss") * 1024 >= arena.nbytes
    agent = Arena.attach(os.dup(arena.fd), 2, (9 << 20) + 5000)
    assert (bytes(agent.slot(0)[:4]), bytes(agent.slot(1)[-4:])) == (b"kept", b"last")
    assert not any(agent.slot(0)[4:])
    agent.close()
    arena.close()


def _kernel_collapses() -> bool:
    """Whether MADV_COLLAPSE works on shared memory here, tried on memory of this test's own."""
    import ctypes

    from ftckpt.shm.mapping import HUGE_PAGE, Mapping

    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.memfd_create("probe")
    try:
        os.ftruncate(fd, HUGE_PAGE)
        mapping = Mapping(fd, HUGE_PAGE, writable=True)
        mapping.view()[0] = 1
        return bool(libc.madvise(ctypes.c_void_p(mapping.address), ctypes.c_size_t(HUGE_PAGE), 25) == 0)
    finally:
        os.close(fd)


def _mapped_kb(field: str) -> int:
    """A figure of the first arena in this process's memory map."""
    lines = Path("/proc/self/smaps").read_text().split("ftckpt-arena", 1)[1].splitlines()[1:]
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


@pytest.mark.covers("F70")
def test_forked_child_holds_nothing_of_it() -> None:
    arena = Arena.create(1, 1 << 20)
    arena.slot(0)[:1] = b"x"
    inode = os.fstat(arena.fd).st_ino
    child = os.fork()
    if child == 0:
        mapped = "ftckpt-arena" in Path("/proc/self/maps").read_text()
        held = any(_inode(fd) == inode for fd in os.listdir("/proc/self/fd"))
        try:
            arena.slot(0)
        except AgentError:
            os._exit(2 if mapped else 3 if held else 0)
        os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bytes(arena.slot(0)[:1]) == b"x"
    arena.close()


def _inode(fd: str) -> int:
    try:
        return os.fstat(int(fd)).st_ino
    except OSError:
        return -1


@pytest.mark.covers("F76", "F66")
def test_descriptors_and_mappings_stay_flat_over_many_arenas() -> None:
    def measure() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("ftckpt-arena")

    before = measure()
    for _ in range(100):
        arena = Arena.create(1, 1 << 16)
        Arena.attach(os.dup(arena.fd), 1, 1 << 16).close()
        arena.close()
    assert measure() == before


def test_memory_still_viewed_outlives_close_and_goes_with_the_last_view() -> None:
    arena = Arena.create(1, 4096)
    view = arena.slot(0)
    view[:1] = b"v"
    arena.close()
    assert bytes(view[:1]) == b"v"
    with pytest.raises(AgentError, match="closed"):
        arena.slot(0)


@pytest.mark.covers("F78")
def test_arena_beyond_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"needs 2,000 bytes.*1,000 are available \(here\)"):
        check_budget(2000, available=Budget(1000, "here"))
    with pytest.raises(ConfigError, match="bytes of memory"):
        Arena.create(1, 1 << 50)


@pytest.mark.parametrize(
    ("line", "directory", "files"),
    [
        ("0::/job/step", "job", {"memory.max": "5000", "memory.current": "3000", "memory.stat": "inactive_file 1000\n"}),
        (
            "9:memory:/job/step",
            "memory/job",
            {"memory.limit_in_bytes": "5000", "memory.usage_in_bytes": "3000", "memory.stat": "total_inactive_file 1000\n"},
        ),
    ],
)
def test_limit_of_any_control_group_above_counts_less_what_can_be_reclaimed(
    tmp_path: Path, line: str, directory: str, files: dict[str, str]
) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(line + "\n")
    (proc / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 90 kB\n")
    group = cgroup / directory
    (group / "step").mkdir(parents=True)
    for name, text in files.items():
        (group / name).write_text(text)
    found = available_memory(proc, cgroup)
    assert found.available == 3000
    assert "job" in found.bound


def test_without_limits_what_the_kernel_has_available_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 90 kB\n")
    assert available_memory(tmp_path, tmp_path) == Budget(90 * 1024, "MemAvailable")

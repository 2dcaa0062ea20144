"""The local store: order of system calls, failures at every point, links, races, alignment."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import mmap
import os
import shutil
import stat
import threading

import pytest

from ftckpt.errors import ConfigError, Damaged, FtckptError, NotFound, StoreError
from ftckpt.stores.local import LocalStore
from ftckpt.stores.posix import PosixOps
from ftckpt.testing.faults import Fault, RecordingOps

DATA = bytes(range(256)) * 64


def aligned(size: int) -> memoryview:
    """Page-aligned memory with recognisable bytes."""
    memory = memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    memory[:] = (DATA * (size // len(DATA) + 1))[:size]
    return memory


def write(store, path="d/large", data=DATA):
    with store.writer(path, len(data)) as writer:
        writer.write_at(0, data)
        writer.commit()


def everything_in(directory) -> list[str]:
    return sorted(os.path.relpath(os.path.join(at, f), directory) for at, _, files in os.walk(directory) for f in files)


def opened(tmp_path, *faults, **kw):
    ops = RecordingOps(*faults)
    return LocalStore(tmp_path / "root", ops=ops, **kw), ops


@pytest.mark.covers("F5")
@pytest.mark.parametrize("how", ["put", "put_if_absent", "writer"])
def test_calls_are_write_fsync_rename_fsync_of_directory(tmp_path, how):
    store, ops = opened(tmp_path)
    store.put("d/first", b"")
    ops.calls.clear()
    if how == "writer":
        write(store, "d/x", aligned(3 * 4096 + 5))
    else:
        store.put("d/x", DATA, if_absent=how == "put_if_absent")
    calls = ops.changing()
    temporary, directory = calls[0].path, str(tmp_path / "root/d")
    assert os.path.dirname(temporary) == directory
    order = [(c.op, c.path) for c in calls if c.op not in ("open", "allocate")]
    writes = [c for c in order if c[0] == "pwrite"]
    assert set(writes) == {("pwrite", temporary)}
    assert order[len(writes) :] == [
        ("fsync", temporary),
        ("rename" if how == "put" else "rename_new", temporary),
        ("fsync", directory),
    ]
    assert calls[-2].args[0] == str(tmp_path / "root/d/x")


@pytest.mark.covers("F5")
def test_new_directories_are_durable_before_a_file_in_them_is_named(tmp_path):
    store, ops = opened(tmp_path)
    store.put("a/b/x", b"1")
    root = str(tmp_path / "root")
    calls = [(c.op, c.path) for c in ops.changing()]
    for made, parent in ((root, str(tmp_path)), (root + "/a", root), (root + "/a/b", root + "/a")):
        assert calls.index(("mkdir", made)) < calls.index(("fsync", parent)) < calls.index(("rename", calls[-2][1]))


@pytest.mark.covers("F5", "F73")
def test_directory_made_by_another_process_is_made_durable_too(tmp_path):
    (tmp_path / "root/a/b").mkdir(parents=True)
    store, ops = opened(tmp_path)
    write(store, "a/b/x")
    fsynced = [c.path for c in ops.changing() if c.op == "fsync"]
    assert fsynced[:2] == [str(tmp_path / "root"), str(tmp_path / "root/a")]


@pytest.mark.covers("F4")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("written", [None, len(DATA) // 2, len(DATA)])
@pytest.mark.parametrize("direct", [True, False])
def test_failed_write_leaves_earlier_content_and_no_temporary(tmp_path, code, written, direct):
    store, _ = opened(tmp_path, Fault(op="pwrite", nth=2, times=0, code=code, after_bytes=written), direct=direct)
    store.put("d/x", DATA)
    before = hashlib.sha256(store.get("d/x")).hexdigest()
    with pytest.raises(StoreError, match=errno.errorcode[code]) as failure:
        store.put("d/x", DATA[::-1])
    with pytest.raises(StoreError, match=errno.errorcode[code]):
        write(store, "d/large", aligned(len(DATA)))
    assert failure.value.todo
    assert failure.value.now
    assert hashlib.sha256(store.get("d/x")).hexdigest() == before
    assert everything_in(tmp_path) == ["root/d/x"]


@pytest.mark.covers("F4")
@pytest.mark.parametrize("op", ["open", "allocate", "fsync", "rename_new"])
def test_failure_at_any_other_call_of_a_writer_leaves_nothing(tmp_path, op):
    store, _ = opened(tmp_path, Fault(op=op, path="*tmp-*", code=errno.ENOSPC))
    with pytest.raises(StoreError, match="ENOSPC"):
        write(store)
    assert everything_in(tmp_path) == []


@pytest.mark.covers("F72")
@pytest.mark.parametrize(("how", "op"), [("put", "rename"), ("put_if_absent", "rename_new"), ("writer", "rename_new")])
def test_rename_that_reports_failure_but_took_effect_is_success(tmp_path, how, op):
    store, _ = opened(tmp_path, Fault(op=op, effect=True))
    if how == "writer":
        write(store, "x")
    else:
        assert store.put("x", DATA, if_absent=how == "put_if_absent") is True
    assert store.get("x") == DATA
    assert everything_in(tmp_path) == ["root/x"]


@pytest.mark.covers("F72")
def test_rename_that_failed_is_failure_even_if_equal_bytes_are_there(tmp_path):
    store, _ = opened(tmp_path, Fault(op="rename", nth=2))
    store.put("x", DATA)
    with pytest.raises(StoreError, match="EIO"):
        store.put("x", DATA)


@pytest.mark.covers("F72")
def test_link_answered_twice_by_a_network_file_system_is_success(tmp_path):
    cannot = Fault(op="rename_new", code=errno.EINVAL, times=0)
    store, _ = opened(tmp_path, cannot, Fault(op="link", code=errno.EEXIST, effect=True))
    assert store.put("x", DATA, if_absent=True) is True
    assert store.put("x", b"other", if_absent=True) is False
    assert store.get("x") == DATA
    assert everything_in(tmp_path) == ["root/x"]


@pytest.mark.covers("F73")
def test_makedirs_race_is_tolerated_only_for_directories(tmp_path):
    store, _ = opened(tmp_path, Fault(op="mkdir", path="*/d", code=errno.EEXIST, effect=True))
    assert store.put("d/x", b"1") is True
    (tmp_path / "root/file").write_bytes(b"")
    with pytest.raises(StoreError):
        store.put("file/x", b"1")


@pytest.mark.covers("F73")
@pytest.mark.parametrize("times", [1, 2])
def test_stale_open_is_retried_once(tmp_path, times):
    store, _ = opened(tmp_path)
    store.put("x", DATA)
    store, _ = opened(tmp_path, Fault(op="open", path="*/x", code=errno.ESTALE, times=times))
    if times == 1:
        assert store.get("x") == DATA
    else:
        with pytest.raises(StoreError, match="ESTALE"):
            store.reader("x")


@pytest.mark.covers("F17")
def test_symlinked_directory_is_removed_as_a_link_only(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious").write_bytes(b"1")
    store = LocalStore(tmp_path / "root")
    store.put("g/s1/x", b"1")
    os.symlink(foreign, tmp_path / "root/g/s2")
    os.symlink(foreign, tmp_path / "root/g/s1/inner")
    assert store.listdir("g") == ["s1", "s2"]
    assert [f.path for f in store.files("g")] == ["g/s1/x"]
    store.remove_tree("g/s2")
    store.remove_tree("g/s1")
    assert store.listdir("g") == []
    assert store.leftovers("g") == []
    assert (foreign / "precious").read_bytes() == b"1"


@pytest.mark.covers("F17", "I10")
def test_links_do_not_lead_out_of_the_root(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "x").write_bytes(b"1")
    store = LocalStore(tmp_path / "root")
    store.put("a", b"1")
    os.symlink(foreign, tmp_path / "root/d")
    os.symlink(foreign / "x", tmp_path / "root/link")
    for action in (lambda: store.put("d/y", b""), lambda: write(store, "d/y"), lambda: store.get("d/x"), lambda: store.remove_tree("d/x")):
        with pytest.raises(ConfigError):
            action()
    with pytest.raises(ConfigError):
        store.get("link")
    assert not store.exists("link")
    assert everything_in(foreign) == ["x"]


def test_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "root")
    store = LocalStore(tmp_path / "root")
    write(store, "a/x")
    assert store.get("a/x") == DATA


@pytest.mark.covers("F16")
def test_removal_that_fails_half_way_has_taken_the_name_away(tmp_path):
    store, _ = opened(tmp_path, Fault(op="rmdir", code=errno.ENOTEMPTY))
    store.put("g/s1/x", b"1")
    with pytest.raises(StoreError, match="ENOTEMPTY"):
        store.remove_tree("g/s1")
    assert store.listdir("g") == []
    (left,) = store.leftovers("g")
    store.remove_tree(f"g/{left}")
    assert store.leftovers("g") == []


@pytest.mark.covers("I10")
def test_umask_is_honoured(tmp_path):
    before = os.umask(0o027)
    try:
        store = LocalStore(tmp_path / "root")
        store.put("d/small", b"1")
        write(store, "d/large")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE(os.stat(tmp_path / "root" / name).st_mode) for name in ("d", "d/small", "d/large")}
    assert modes == {"d": 0o750, "d/small": 0o640, "d/large": 0o640}


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 12345])
@pytest.mark.parametrize("shift", [0, 1])
def test_every_size_and_alignment_is_written_whole(tmp_path, size, shift):
    data = aligned(size + shift)[shift:]
    store = LocalStore(tmp_path / "root")
    with store.writer("x", 4096 + size) as writer:
        writer.write_at(4096, data)
        writer.write_at(0, bytes(4096))
        writer.commit()
    assert store.get("x") == bytes(4096) + bytes(data)


def test_file_system_without_direct_io_falls_back(tmp_path):
    refused = (Fault(op="allocate", code=errno.EOPNOTSUPP), Fault(op="pwrite", code=errno.EINVAL))
    store, ops = opened(tmp_path, *refused)
    write(store, "x", aligned(len(DATA)))
    assert store.get("x") == DATA
    assert [c.failed for c in ops.calls if c.op == "pwrite"] == [True, False]


@pytest.mark.parametrize("most", [1000, 4096])
def test_short_writes_are_continued(tmp_path, most):
    store, ops = opened(tmp_path)
    whole = ops.call

    def short(op, function, *args):
        return whole(op, function, args[0], args[1][:most], args[2]) if op == "pwrite" else whole(op, function, *args)

    ops.call = short
    write(store, "x", aligned(len(DATA)))
    store.put("y", DATA)
    assert store.get("x") == store.get("y") == DATA


def test_view_outlives_its_reader(tmp_path):
    store = LocalStore(tmp_path)
    store.put("x", DATA)
    with store.reader("x") as reader:
        view = reader.view()
    assert bytes(view) == DATA


@pytest.mark.covers("F3")
def test_file_that_shrank_is_damaged_with_sizes(tmp_path):
    store = LocalStore(tmp_path)
    store.put("x", DATA)
    with store.reader("x") as reader:
        os.truncate(tmp_path / "x", 100)
        with pytest.raises(Damaged, match=r"expected 200 bytes, found 100"):
            reader.read_into(0, memoryview(bytearray(200)))


def test_fifo_and_directory_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    store = LocalStore(tmp_path)
    store.put("d/x", b"")
    for name in ("fifo", "d"):
        with pytest.raises(NotFound):
            store.get(name)


def test_descriptors_do_not_grow(tmp_path):
    store, _ = opened(tmp_path, Fault(op="fsync", nth=40, times=20))
    before = len(os.listdir("/proc/self/fd"))
    failed = 0
    for i in range(30):
        try:
            store.put(f"d/{i}", DATA)
            write(store, f"e/{i}")
            store.get(f"d/{i}")
        except StoreError:
            failed += 1
    assert failed
    assert len(os.listdir("/proc/self/fd")) == before


def test_concurrent_writers_in_one_new_directory(tmp_path):
    store = LocalStore(tmp_path / "root")
    errors = []

    def one(i):
        try:
            write(store, f"a/b/c/{i}", aligned(100_000 + i))
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert errors == []
    assert len(store.listdir("a/b/c")) == 8


def do_everything(store):
    """Use every operation once; a typed error of one does not keep the others from being used."""

    def read():
        with store.reader("d/x") as reader:
            reader.read_into(0, memoryview(bytearray(4)))
            reader.view()

    for action in (
        lambda: store.put("d/x", DATA),
        lambda: store.put("d/y", DATA, if_absent=True),
        lambda: write(store),
        lambda: store.get("d/x"),
        read,
        lambda: store.exists("d/x"),
        lambda: store.listdir("d"),
        lambda: list(store.files()),
        lambda: store.remove("d/y"),
        lambda: store.remove_tree("d"),
    ):
        with contextlib.suppress(FtckptError):
            action()


OPERATIONS = sorted(name for name, f in vars(PosixOps).items() if inspect.isfunction(f) and name != "call")


@pytest.mark.covers("F4", "I14")
@pytest.mark.parametrize("op", OPERATIONS)
def test_whatever_call_fails_only_typed_errors_come_out(tmp_path, op):
    ops = RecordingOps()
    do_everything(LocalStore(tmp_path / "probe", ops=ops))
    number = max(1, sum(c.op == op for c in ops.calls))
    for nth in range(1, number + 1):
        root = tmp_path / f"{op}-{nth}"
        ops = RecordingOps(Fault(op=op, nth=nth))
        do_everything(LocalStore(root, ops=ops))
        assert not [name for name in everything_in(root) if ".tmp-" in name] or op == "unlink"


def test_probe_uses_every_operation(tmp_path):
    ops = RecordingOps(Fault(op="rename_new", code=errno.ENOSYS, times=0))
    do_everything(LocalStore(tmp_path / "root", ops=ops))
    assert {c.op for c in ops.calls} == set(OPERATIONS)


@pytest.mark.covers("I7", "F7")
@pytest.mark.parametrize("call", ["open", "rename"])
def test_a_directory_that_a_clean_up_takes_away_while_it_is_empty_is_made_again(tmp_path, call):
    class Swept(PosixOps):
        left = 1

        def open(self, path, flags, mode=0o666):
            if call == "open" and "s1" in path and flags & os.O_CREAT:
                self.sweep()
            return super().open(path, flags, mode)

        def rename(self, source, target):
            if call == "rename":
                self.sweep()
            super().rename(source, target)

        def sweep(self):
            if self.left:
                self.left -= 1
                shutil.rmtree(tmp_path / "root" / "s1")

    (tmp_path / "root").mkdir()
    store = LocalStore(tmp_path / "root", ops=Swept())
    assert store.put("s1/attempt.json", b"mine")
    assert store.get("s1/attempt.json") == b"mine"
    store.ops.left = 9
    with pytest.raises(StoreError, match="ENOENT"):
        store.put("s1/more.json", b"mine")


@pytest.mark.covers("I7", "F7")
@pytest.mark.parametrize("nth", [1, 2])
def test_a_large_file_finds_its_directory_again_that_a_clean_up_took_away_while_it_was_empty(tmp_path, nth):
    class Swept(PosixOps):
        opened, left = 0, 1

        def open(self, path, flags, mode=0o666):
            if "s1/" in path:
                self.opened += 1
            if self.left and self.opened == nth:
                self.left -= 1
                shutil.rmtree(tmp_path / "root" / "s1")
            return super().open(path, flags, mode)

    (tmp_path / "root").mkdir()
    store = LocalStore(tmp_path / "root", ops=Swept())
    with store.writer("s1/shard", 8192) as writer:
        writer.write_at(0, bytes(8192))
        writer.commit()
    assert store.get("s1/shard") == bytes(8192)
    assert store.leftovers("s1") == []
    store.ops.left, store.ops.opened = 9, nth - 1
    with pytest.raises(StoreError, match="ENOENT"), store.writer("s1/more", 8192):
        pass


@pytest.mark.covers("F7")
def test_what_is_missing_in_a_directory_that_is_there_is_not_tried_again(tmp_path):
    (tmp_path / "root").mkdir()
    ops = RecordingOps(Fault(op="open", path="*/s1/.*", code=errno.ENOENT, times=0))
    store = LocalStore(tmp_path / "root", ops=ops)
    with pytest.raises(StoreError, match="ENOENT"), store.writer("s1/shard", 1):
        pass
    assert len([c for c in ops.calls if c.op == "open" and "/s1/." in c.path]) == 1


@pytest.mark.covers("I8")
@pytest.mark.parametrize("before", [False, True], ids=["at-once", "after-a-write"])
def test_a_root_that_was_there_is_not_made_anew(tmp_path, before):
    (tmp_path / "mount" / "root").mkdir(parents=True)
    store = LocalStore(tmp_path / "mount" / "root", existing=True)
    if before:
        store.put("a/b", b"1")
    for gone in ("mount/root", "mount"):
        (tmp_path / gone).rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match=r"is gone|ENOENT"):
            store.put("a/c", b"2")
        with pytest.raises(StoreError, match=r"is gone|ENOENT"), store.writer("a/d", 1):
            pass
        assert not (tmp_path / gone).exists()
        (tmp_path / "elsewhere").rename(tmp_path / gone)
    assert store.put("a/c", b"2")

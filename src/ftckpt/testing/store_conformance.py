"""What every BlobStore must do, as checks that take a fresh, empty store; usable by anybody who writes a store.

``CHECKS`` maps a name to a check. Each raises ``ConformanceError`` with what was expected and found. Nothing here knows how a
store works inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ftckpt.errors import ConfigError, Damaged, FtckptError, NotFound, StoreError
from ftckpt.ports import BlobStore

CHECKS: dict[str, Callable[[BlobStore], None]] = {}

BAD_PATHS = ("../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "..", ".", "a/", "nul\0", "a\\..\\b", "x" * 300)


class ConformanceError(Exception):
    """A store does not keep the port's promises."""


def expect(found: object, expected: object, what: str) -> None:
    """Raise ConformanceError unless ``found`` equals ``expected``."""
    if found != expected:
        raise ConformanceError(f"{what}: expected {expected!r}, found {found!r}")


def expect_error(kind: type[FtckptError], what: str, action: Callable[[], object]) -> None:
    """Raise ConformanceError unless ``action`` raises ``kind``."""
    try:
        found = action()
    except kind:
        return
    raise ConformanceError(f"{what}: expected {kind.__name__}, found {found!r}")


def _check(function: Callable[[BlobStore], None]) -> Callable[[BlobStore], None]:
    CHECKS[function.__name__] = function
    return function


def _write(store: BlobStore, path: str, data: bytes, piece: int = 1000) -> None:
    with store.writer(path, len(data)) as writer:
        for at in reversed(range(0, len(data), piece)):
            writer.write_at(at, data[at : at + piece])
        writer.commit()


@_check
def put_then_get(store: BlobStore) -> None:
    """What was put is got back, and a later put replaces it."""
    for data in (b"one", b"", b"three"):
        expect(store.put("d/e/f.json", data), True, "put")
        expect(store.get("d/e/f.json"), data, "get")


@_check
def put_if_absent_keeps_the_first(store: BlobStore) -> None:
    """``if_absent`` stores once and leaves later content alone."""
    expect(store.put("job.json", b"mine", if_absent=True), True, "first put")
    expect(store.put("job.json", b"theirs", if_absent=True), False, "second put")
    expect(store.get("job.json"), b"mine", "content")


@_check
def one_of_many_wins_put_if_absent(store: BlobStore) -> None:
    """Of many concurrent ``if_absent`` puts exactly one says True, and its bytes are there."""
    won: list[int] = []

    def racer(i: int) -> None:
        if store.put("d/once", b"%d" % i, if_absent=True):
            won.append(i)

    threads = [threading.Thread(target=racer, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expect(len(won), 1, "winners")
    expect(store.get("d/once"), b"%d" % won[0], "content")


@_check
def missing_is_not_found(store: BlobStore) -> None:
    """Reading what is not there is NotFound; looking for it and removing it are no errors."""
    store.put("d/there", b"x")
    for path in ("nothing", "d/nothing", "d", "d/there/below"):
        expect_error(NotFound, f"get {path}", lambda path=path: store.get(path))  # type: ignore[misc]
        expect_error(NotFound, f"reader {path}", lambda path=path: store.reader(path))  # type: ignore[misc]
        expect(store.exists(path), False, f"exists {path}")
    expect(store.listdir("nothing"), [], "listdir of nothing")
    expect(list(store.files("nothing")), [], "files of nothing")
    store.remove("nothing")
    store.remove_tree("nothing")


@_check
def bad_paths_are_refused(store: BlobStore) -> None:
    """Paths that leave the root, or could, are a ConfigError everywhere, and nothing happens."""
    for path in BAD_PATHS:
        for what, action in (
            ("put", lambda path=path: store.put(path, b"x")),
            ("get", lambda path=path: store.get(path)),
            ("reader", lambda path=path: store.reader(path)),
            ("exists", lambda path=path: store.exists(path)),
            ("listdir", lambda path=path: store.listdir(path)),
            ("files", lambda path=path: list(store.files(path))),
            ("remove", lambda path=path: store.remove(path)),
            ("remove_tree", lambda path=path: store.remove_tree(path)),
            ("writer", lambda path=path: _write(store, path, b"x")),
        ):
            expect_error(ConfigError, f"{what} {path!r}", action)
    expect_error(ConfigError, "remove_tree of the root", lambda: store.remove_tree(""))
    expect(list(store.files()), [], "files")


@_check
def listing_is_sorted_and_shallow(store: BlobStore) -> None:
    """``listdir`` gives names of one level, ``files`` all files below with their sizes."""
    for path, size in (("b/2", 2), ("b/1/x", 1), ("a", 3), ("b0", 0)):
        store.put(path, bytes(size))
    expect(store.listdir(), ["a", "b", "b0"], "listdir")
    expect(store.listdir("b"), ["1", "2"], "listdir b")
    expect([(f.path, f.size) for f in store.files("b")], [("b/1/x", 1), ("b/2", 2)], "files b")
    expect(sorted(f.path for f in store.files()), ["a", "b/1/x", "b/2", "b0"], "files")


@_check
def written_in_any_order(store: BlobStore) -> None:
    """A large file is whole whatever the order, size and alignment of its writes."""
    data = bytes(range(256)) * 97
    for piece in (4096, 1000, len(data)):
        path = f"d/large-{piece}"
        _write(store, path, data, piece)
        expect(store.get(path), data, f"content in pieces of {piece}")
    _write(store, "d/empty", b"")
    expect(store.get("d/empty"), b"", "empty file")


@_check
def written_from_several_threads(store: BlobStore) -> None:
    """Writes may come from several threads."""
    data = bytes(range(256)) * 4096
    step = 64 << 10
    with store.writer("large", len(data)) as writer:
        threads = [threading.Thread(target=writer.write_at, args=(at, data[at : at + step])) for at in range(0, len(data), step)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        writer.commit()
    expect(store.get("large") == data, True, "content equal")


@_check
def nothing_visible_before_commit(store: BlobStore) -> None:
    """A file being written is not seen under its name, nor listed, and is gone when it is given up."""
    with store.writer("d/large", 4) as writer:
        writer.write_at(0, b"1234")
        expect(store.exists("d/large"), False, "exists before commit")
        expect(store.listdir("d"), [], "listdir before commit")
    expect(store.exists("d/large"), False, "exists after giving up")
    expect(list(store.files()), [], "files after giving up")


@_check
def writer_refuses_existing(store: BlobStore) -> None:
    """A large file never replaces another: not one that was there, nor one that came meanwhile."""
    store.put("d/x", b"old")
    expect_error(StoreError, "writer", lambda: _write(store, "d/x", b"new"))

    def late() -> None:
        with store.writer("d/y", 3) as writer:
            writer.write_at(0, b"new")
            store.put("d/y", b"old")
            writer.commit()

    expect_error(StoreError, "commit", late)
    expect((store.get("d/x"), store.get("d/y")), (b"old", b"old"), "contents")
    expect(store.listdir("d"), ["x", "y"], "listdir")


@_check
def writer_wants_all_bytes(store: BlobStore) -> None:
    """A file with bytes missing, or too many, is refused."""

    def short() -> None:
        with store.writer("d/x", 10) as writer:
            writer.write_at(0, b"12345")
            writer.commit()

    def long() -> None:
        with store.writer("d/x", 3) as writer:
            writer.write_at(0, b"12345")

    expect_error(StoreError, "short", short)
    expect_error(StoreError, "long", long)
    expect(store.exists("d/x"), False, "exists")


@_check
def readers_read_ranges(store: BlobStore) -> None:
    """Ranges and, where offered, the view are the file's bytes; a range past the end is Damaged."""
    data = bytes(range(200))
    store.put("x", data)
    with store.reader("x") as reader:
        expect(reader.size, 200, "size")
        target = bytearray(50)
        reader.read_into(100, memoryview(target))
        expect(bytes(target), data[100:150], "range")
        view = reader.view()
        if view is not None:
            expect(bytes(view), data, "view")
            view.release()
        expect_error(Damaged, "past the end", lambda: reader.read_into(190, memoryview(target)))
    store.put("empty", b"")
    with store.reader("empty") as reader:
        expect((reader.size, bytes(reader.view() or b"")), (0, b""), "empty file")


@_check
def a_reader_outlives_removal_or_says_so(store: BlobStore) -> None:
    """A file replaced or removed while it is read gives its old bytes or a typed error, never others."""
    store.put("x", b"old")
    with store.reader("x") as reader:
        store.put("x", b"newer")
        store.remove("x")
        target = bytearray(3)
        try:
            reader.read_into(0, memoryview(target))
        except FtckptError:
            return
        expect(bytes(target), b"old", "bytes")


@_check
def remove_tree_removes_one_directory(store: BlobStore) -> None:
    """``remove_tree`` removes what is below the name, and nothing whose name only begins alike."""
    for path in ("g/s1/a", "g/s1/b/c", "g/s10/a", "g/s1.json"):
        store.put(path, b"x")
    store.remove_tree("g/s1")
    expect([f.path for f in store.files()], ["g/s1.json", "g/s10/a"], "files")
    store.put("g/s1/a", b"again")
    expect(store.get("g/s1/a"), b"again", "put after removal")


@_check
def a_file_is_no_directory(store: BlobStore) -> None:
    """Writing below a file, or over a directory, is a StoreError and changes nothing; or, where names are only names, both are kept."""
    store.put("d/x", b"x")
    kept = {"d/x"}
    for path in ("d/x/y", "d"):
        try:
            store.put(path, b"y")
        except StoreError:
            continue
        kept.add(path)
    expect({f.path for f in store.files()}, kept, "files")
    expect(store.get("d/x"), b"x", "content")


@_check
def odd_names_work(store: BlobStore) -> None:
    """Names with blanks, dots and letters of any script."""
    for path in ("a b/ü–漢.json", ".hidden/x", "a..b/c", "-x"):
        store.put(path, path.encode())
        expect(store.get(path), path.encode(), path)
    expect(store.listdir(), ["-x", ".hidden", "a b", "a..b"], "listdir")


def run_all(make: Callable[[], BlobStore]) -> None:
    """Run every check, each on a fresh store.

    Raises:
        ConformanceError: naming the first check that failed.
    """
    for name, check in CHECKS.items():
        store = make()
        try:
            check(store)
        except ConformanceError as e:
            raise ConformanceError(f"{name}: {e}") from e
        finally:
            store.close()

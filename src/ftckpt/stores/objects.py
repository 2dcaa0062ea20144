"""A BlobStore on an object store (S3 and its kin) over obstore. It knows paths and bytes, never generations.

There is no rename here: an object appears under its name whole or not at all, and what makes a generation is the manifest and
then its record. A removal is announced by a small note, so that one that died half way is known and ended later.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import obstore

from ftckpt.errors import Damaged, NotFound, StoreError
from ftckpt.ports import BlobInfo
from ftckpt.stores.objectfiles import ObjectWriter, mapped
from ftckpt.stores.paths import TRASH, check_path, hidden

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Bucket

_WINDOW = 16 << 20  # bytes asked for by one request


class ObjectStore:
    """Objects below one prefix of one bucket. Thread-safe.

    Args:
        url: as given by the user, for messages.
        bucket: obstore's store, already at the prefix.
        conditional: whether the server knows "only if it does not exist"; without, it is looked first, and of two at once both may win.
    """

    def __init__(self, url: str, bucket: Bucket, *, conditional: bool = True) -> None:
        self.url = url.rstrip("/")
        self._bucket = bucket
        self._conditional = conditional

    # ------------------------------------------------------------------ writing
    def put(self, path: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store a small file; see ``BlobStore.put``.

        A refusal that finds these very bytes is our own request, sent twice, whose first answer was lost.
        """
        check_path(path)
        with mapped("write", self._where(path)):
            if not if_absent:
                obstore.put(self._bucket, path, data, use_multipart=False)
                return True
            return self._create(path, data)

    def writer(self, path: str, size: int) -> ObjectWriter:
        """Open a large file for writing; see ``BlobStore.writer``. Enter it with ``with``."""
        check_path(path)
        if self.exists(path):
            raise occupied(self._where(path))
        return ObjectWriter(self._bucket, path, self._where(path), size, self._create, self.exists)

    # ------------------------------------------------------------------ reading
    def get(self, path: str) -> bytes:
        """Read a small file whole. Raises NotFound."""
        check_path(path)
        with mapped("read", self._where(path)):
            return bytes(obstore.get(self._bucket, path).bytes())

    def reader(self, path: str) -> ObjectReader:
        """Open a file for reading. Raises NotFound."""
        check_path(path)
        with mapped("open", self._where(path)):
            about = obstore.head(self._bucket, path)
        return ObjectReader(self._bucket, path, self._where(path), about["size"], about["e_tag"])

    def exists(self, path: str) -> bool:
        """Whether an object of that name exists."""
        check_path(path)
        try:
            with mapped("look at", self._where(path)):
                obstore.head(self._bucket, path)
        except NotFound:
            return False
        return True

    def listdir(self, prefix: str = "") -> list[str]:
        """Names directly under a prefix, sorted; notes of removals are left out, see ``leftovers``."""
        return [name for name in self._names(prefix) if not hidden(name)]

    def leftovers(self, prefix: str = "") -> list[str]:
        """Notes of removals that died or still run. Parts of uploads that died are seen by the provider's life cycle rules only."""
        return [name for name in self._names(prefix) if hidden(name)]

    def files(self, prefix: str = "") -> Iterator[BlobInfo]:
        """All objects below a prefix, sorted by path."""
        check_path(prefix, empty=True)
        with mapped("list", self._where(prefix)):
            found = [BlobInfo(o["path"], o["size"]) for page in obstore.list(self._bucket, prefix or None) for o in page]
        shown = [info for info in found if info.path != prefix and not any(hidden(part) for part in info.path.split("/"))]
        yield from sorted(shown, key=lambda info: info.path.split("/"))

    # ------------------------------------------------------------------ removing
    def remove_tree(self, prefix: str) -> None:
        """Remove every object below a prefix; given the name of a note, end the removal that it announced.

        Raises:
            StoreError: something could not be removed; the note is still there, and ``leftovers`` shows it.
        """
        check_path(prefix)
        directory, _, name = prefix.rpartition("/")
        if name.startswith(TRASH):
            note = prefix
            try:
                target = check_path(self.get(note).decode(errors="replace"))
            except NotFound:
                return
        else:
            if not self.exists(prefix) and not self._names(prefix):
                return
            target = prefix
            note = f"{directory}/{TRASH}{name[:200]}-{secrets.token_hex(4)}".lstrip("/")
            self.put(note, target.encode())
        with mapped("remove", self._where(target), "part of it may be gone; its note is there, and nothing resumes from it"):
            paths = [o["path"] for page in obstore.list(self._bucket, target) for o in page]
            if paths:
                obstore.delete(self._bucket, paths)
        self.remove(target)
        self.remove(note)

    def remove(self, path: str) -> None:
        """Remove one object; missing is no error."""
        check_path(path)
        try:
            with mapped("remove", self._where(path), "it is still there"):
                obstore.delete(self._bucket, path)
        except NotFound:
            return

    def close(self) -> None:
        """Nothing is held between calls."""

    # ------------------------------------------------------------------ parts
    def _where(self, path: str) -> str:
        return f"{self.url}/{path}"

    def _create(self, path: str, data: bytes) -> bool:
        """Store it unless something is there; only within ``mapped``."""
        if not self._conditional:
            if self.exists(path):
                return False
            obstore.put(self._bucket, path, data, use_multipart=False)
            return True
        try:
            obstore.put(self._bucket, path, data, mode="create", use_multipart=False)
        except obstore.exceptions.AlreadyExistsError:
            return bytes(obstore.get(self._bucket, path).bytes()) == data
        return True

    def _names(self, prefix: str) -> list[str]:
        check_path(prefix, empty=True)
        with mapped("list", self._where(prefix)):
            found = obstore.list_with_delimiter(self._bucket, prefix or None)
        paths = [*found["common_prefixes"], *(o["path"] for o in found["objects"] if o["path"] != prefix)]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})


class ObjectReader:
    """An open object: what is read is the version that was there when it was opened, or an error; see ``BlobReader``."""

    request_bytes = 8 << 20

    def __init__(self, bucket: Bucket, path: str, where: str, size: int, tag: str | None) -> None:
        self.size = size
        self._bucket, self._path, self._where, self._tag = bucket, path, where, tag

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing is held."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset``; raises Damaged when the file is too short or was replaced meanwhile."""
        view = target.cast("B")
        if offset < 0 or offset + len(view) > self.size:
            raise Damaged(f"{self._where} is too short: expected {offset + len(view)} bytes, found {self.size}")
        for begin in range(0, len(view), _WINDOW):
            part = view[begin : begin + _WINDOW]
            start = offset + begin
            with mapped("read", self._where, "its bytes were not used"):
                options = {"range": (start, start + len(part))} | ({"if_match": self._tag} if self._tag else {})
                data = memoryview(obstore.get(self._bucket, self._path, options=options).bytes())  # type: ignore[arg-type]
            if len(data) != len(part):
                raise Damaged(f"{self._where}: expected {len(part)} bytes at {start}, found {len(data)}", now="its bytes were not used")
            part[:] = data

    def view(self) -> memoryview | None:
        """Objects are not memory."""
        return None


def occupied(where: str) -> StoreError:
    """Nothing is written over."""
    return StoreError(f"{where} exists already", now="it is unchanged", todo="write under another name; nothing is overwritten")

"""One large object being written, and the edge where obstore's errors become ours. No names, no policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import obstore
from obstore import exceptions

from ftckpt.errors import Damaged, NotFound, StoreError

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import ObjectStore as Bucket

WHOLE_BYTES = 8 << 20  # up to this size an object is one request, refused atomically if the name is taken
PART_BYTES = 8 << 20
PARTS_AT_ONCE = 8
_MAX_PARTS = 9000  # S3 takes 10 000
_DENIED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)


@contextmanager
def mapped(doing: str, where: str, now: str = "earlier content is unchanged") -> Iterator[None]:
    """Turn obstore's errors into NotFound, Damaged (the object was replaced) or StoreError, with what to do.

    Args:
        doing: what was being done ("write"), for the message.
        where: the object's URL, for the message.
        now: what is true after the failure.
    """
    try:
        yield
    except (FileNotFoundError, exceptions.NotFoundError) as e:
        if "NoSuchBucket" in str(e):
            raise StoreError(
                f"could not {doing} {where}: there is no such bucket", now=now, todo="check the URL, or create the bucket"
            ) from e
        raise NotFound(f"{where} does not exist") from e
    except exceptions.PreconditionError as e:
        raise Damaged(f"{where} was replaced while it was read", now=now, todo="take another generation") from e
    except _DENIED as e:
        raise StoreError(
            f"could not {doing} {where}: {_short(e)}", now=now, todo="check the credentials and what they may do in this bucket"
        ) from e
    except (exceptions.BaseError, OSError, ValueError) as e:
        raise StoreError(
            f"could not {doing} {where}: {_short(e)}", now=now, todo="check the endpoint, the network and the provider's status"
        ) from e


def _short(error: BaseException) -> str:
    """What obstore says, without its dump of internals."""
    text = str(error).partition("\n\nDebug source")[0].partition("<?xml")
    code = text[2].partition("<Code>")[2].partition("</Code>")[0]
    return " ".join((text[0] + code).split())[:500]


class ObjectWriter:
    """A large object; see ``BlobWriter``. Uploaded in parts as its bytes come in ascending order, several parts at a time.

    Bytes that come too early are held in memory until those before them are there.

    Args:
        create: stores a whole object unless the name is taken.
        exists: whether the name is taken.
    """

    in_order = True

    def __init__(
        self, bucket: Bucket, path: str, where: str, size: int, create: Callable[[str, bytes], bool], exists: Callable[[str], bool]
    ) -> None:
        self._bucket, self._path, self._where, self._size = bucket, path, where, size
        self._create, self._exists = create, exists
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}
        self._whole = bytearray()
        self._upload: WritableFile | None = None
        self._at = 0
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give up what was not committed: parts that were uploaded are removed."""
        self._open = False
        self._early.clear()
        if self._upload is not None:
            with mapped("give up", self._where, "nothing is visible under that name"):
                gone = error or StoreError("not committed")
                self._upload.__exit__(type(gone), gone, trace)
                self._upload = None

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write at a byte offset."""
        view = memoryview(data).cast("B")
        with self._lock:
            self._check_open()
            if offset < 0 or offset + len(view) > self._size:
                raise StoreError(f"write of {len(view)} bytes at {offset} is outside the {self._size} bytes of {self._where}")
            if offset != self._at:
                self._early[offset] = bytes(view)
                return
            self._append(view)
            while self._at in self._early:
                self._append(memoryview(self._early.pop(self._at)))

    def commit(self) -> None:
        """Make the object visible."""
        with self._lock:
            self._check_open()
            if self._at < self._size:
                raise StoreError(f"{self._where} has {self._at} of {self._size} bytes", now="nothing is visible under that name")
            with mapped("write", self._where, "nothing is visible under that name"):
                if self._upload is None:
                    free = self._create(self._path, bytes(self._whole))
                else:
                    free = not self._exists(self._path)
                    if free:
                        self._upload.close()
                        self._upload = None
            if not free:
                raise StoreError(
                    f"{self._where} exists already", now="it is unchanged", todo="write under another name; nothing is overwritten"
                )

    def _append(self, view: memoryview) -> None:
        if self._size <= WHOLE_BYTES:
            self._whole += view
        else:
            with mapped("write", self._where, "nothing is visible under that name"):
                if self._upload is None:
                    part = max(PART_BYTES, -(-self._size // _MAX_PARTS))
                    self._upload = obstore.open_writer(self._bucket, self._path, buffer_size=part, max_concurrency=PARTS_AT_ONCE)
                self._upload.write(view)
        self._at += len(view)

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError(f"the writer of {self._where} is not open", todo="use it in a `with` block")

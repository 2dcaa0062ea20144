"""Shard files: the safetensors header of an image, writing both in one pass, reading the header back checked.

Nothing here decides which rank owns what, and nothing here commits a generation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import msgspec

from ftckpt.domain.names import shard_file
from ftckpt.errors import Damaged, Unstorable
from ftckpt.format.digest import PLACEHOLDER, digest_blocks
from ftckpt.format.dtypes import SAFETENSORS_DTYPES, item_bytes
from ftckpt.format.gather import Parts
from ftckpt.format.manifest import ShardInfo, sha256
from ftckpt.format.plan import RESERVED_NAME, Spec, check_table, plan_image
from ftckpt.format.table import REFERRING_VERSION, TABLE_VERSION, TensorTable, page_up
from ftckpt.ports import BlobReader, BlobStore, BlobWriter

__all__ = [
    "SAFETENSORS_DTYPES",
    "Spec",
    "check_table",
    "item_bytes",
    "plan_image",
    "read_header",
    "shard_file",
    "shard_header",
    "write_shard",
]

MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
GROUP_BYTES = 8 << 20  # bytes hashed and written at a time
_LENGTH_BYTES = 8
OURS = "ftckpt"
_OPTIONAL = ("boxes", "holders", "elsewhere")


class _Section(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _OurMetadata(msgspec.Struct, frozen=True):
    ftckpt: str


class _Header(msgspec.Struct, frozen=True):
    metadata: _OurMetadata = msgspec.field(name=RESERVED_NAME)


def shard_header(table: TensorTable) -> bytes:
    """The safetensors header of an image: 8-byte length, JSON, padded with spaces to a multiple of 4096 bytes.

    Its length is the same whether the table has its digests yet or not.

    Raises:
        Unstorable: longer than the 100 MB that safetensors readers accept.
    """
    if not table.digests:
        table = msgspec.structs.replace(table, digests=(PLACEHOLDER,) * table.blocks)
    fields = {name: value for name in table.__struct_fields__ if (value := getattr(table, name)) != () or name not in _OPTIONAL}
    header: dict[str, object] = {RESERVED_NAME: {"format": "pt", OURS: msgspec.json.encode(fields).decode()}}
    header.update(_sections(table))
    text = msgspec.json.encode(header)
    size = page_up(_LENGTH_BYTES + len(text))
    if size - _LENGTH_BYTES > MAX_HEADER_BYTES:
        raise Unstorable(
            f"a shard of {len(table.tensors)} tensors needs a header of {size} bytes; safetensors readers accept {MAX_HEADER_BYTES}",
            now="nothing was written",
            todo="save from more ranks, or merge small tensors",
        )
    return (size - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(size - _LENGTH_BYTES)


def _sections(table: TensorTable) -> dict[str, _Section]:
    """The tensors as any safetensors tool sees them; a part of a tensor gets its offsets after an @."""
    sections: dict[str, _Section] = {}
    taken = {entry.name for entry in table.tensors}
    for entry in table.tensors:
        theirs = SAFETENSORS_DTYPES.get(entry.dtype)
        item = () if theirs is not None else (item_bytes(entry.dtype),)
        for chunk in entry.chunks:
            name = entry.name
            if chunk.sizes != entry.shape or name in sections:
                name = f"{entry.name}@{','.join(map(str, chunk.offsets))}"
                while name in taken:
                    name += "~"
                taken.add(name)
            sections[name] = _Section(theirs or "U8", (*chunk.sizes, *item), (chunk.begin, chunk.end))
    return sections


def write_shard(
    store: BlobStore,
    path: str,
    rank: int,
    table: TensorTable,
    image: memoryview | Parts,
    *,
    threads: int = 1,
    progress: Callable[[int], None] | None = None,
    ready: Callable[[], None] | None = None,
) -> tuple[TensorTable, ShardInfo]:
    """Write and digest an image in one pass, then its header, then make the file durable and visible.

    Args:
        path: of the shard in the store; its last part becomes ``ShardInfo.file``.
        table: of the image, digests empty or stale.
        image: the bytes, in one piece or gathered from several; page-aligned memory is written without a copy where the store can.
        threads: how many groups of blocks are under way at a time.
        progress: called with the number of bytes just written, from the writing threads.
        ready: called once all is written, before the file becomes visible; what it raises ends the writing.

    Returns:
        The table with digests, and what the manifest says of the file.

    Raises:
        StoreError: writing failed; nothing is visible under ``path``.
    """
    if image.nbytes < table.image_bytes:
        raise Unstorable(f"{path}: the image has {image.nbytes} bytes, its table {table.image_bytes}", now="nothing was written")
    whole = image.cast("B")[: table.image_bytes] if isinstance(image, memoryview) else image
    header_bytes = len(shard_header(table))
    with store.writer(path, header_bytes + table.image_bytes) as writer:
        table, header = _pour(writer, table, whole, header_bytes, threads, progress)
        if ready is not None:
            ready()
        writer.commit()
    return table, ShardInfo(
        file=path.rsplit("/", 1)[-1],
        rank=rank,
        bytes=header_bytes + table.image_bytes,
        header_bytes=header_bytes,
        header_sha256=sha256(header),
        image_bytes=table.image_bytes,
    )


def _pour(
    writer: BlobWriter,
    table: TensorTable,
    image: memoryview | Parts,
    header_bytes: int,
    threads: int,
    progress: Callable[[int], None] | None,
) -> tuple[TensorTable, bytes]:
    """Write an image and its header; group by group, in the order that the writer wants.

    Returns:
        The table with digests, and the header.
    """
    group = max(table.block_bytes, GROUP_BYTES // table.block_bytes * table.block_bytes)
    starts = range(0, table.image_bytes, group)

    def part_at(start: int) -> memoryview:
        stop = min(start + group, table.image_bytes)
        return image[start:stop] if isinstance(image, memoryview) else image.part(start, stop)

    def written(start: int, part: memoryview) -> None:
        writer.write_at(header_bytes + start, part)
        if progress is not None:
            progress(len(part))

    def digested(start: int) -> tuple[str, ...]:
        part = part_at(start)
        digests = digest_blocks(part, table.block_bytes)
        if not writer.in_order:
            written(start, part)
        return digests

    # a header has the digests, so that what is uploaded in order is read twice: hashing is far faster than any network
    full = msgspec.structs.replace(table, digests=tuple(_in_order(digested, starts, threads)))
    header = shard_header(full)
    if len(header) != header_bytes:
        raise Unstorable(f"the header grew from {header_bytes} to {len(header)} bytes while the image was written")
    writer.write_at(0, header)
    for start in starts if writer.in_order else ():
        written(start, part_at(start))
    return full, header


def _in_order(one: Callable[[int], tuple[str, ...]], starts: range, threads: int) -> list[str]:
    """Results of ``one`` in order of ``starts``; with more threads a few are under way at a time, the first error ends it."""
    if threads <= 1 or len(starts) < 2:
        return [d for start in starts for d in one(start)]
    done: dict[int, tuple[str, ...]] = {}
    with ThreadPoolExecutor(threads, "ftckpt-write") as pool:
        running: dict[Future[tuple[str, ...]], int] = {}
        for start in starts:
            running[pool.submit(one, start)] = start
            if len(running) >= threads:
                _collect(running, done)
        while running:
            _collect(running, done)
    return [d for start in starts for d in done[start]]


def _collect(running: dict[Future[tuple[str, ...]], int], done: dict[int, tuple[str, ...]]) -> None:
    finished, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in finished:
        done[running.pop(future)] = future.result()


def read_header(reader: BlobReader, where: str, expect: ShardInfo | None = None) -> tuple[TensorTable, int]:
    """Read and check a shard's header; nothing in it is trusted.

    Args:
        reader: the open shard.
        where: file name for messages.
        expect: what the manifest says of the file; without it only the file's own consistency is checked.

    Returns:
        The table, and the number of bytes before the image.

    Raises:
        Damaged: size, header digest, JSON, or a range is wrong; names the file, what was expected and what was found.
    """
    if expect is not None and reader.size != expect.bytes:
        raise _damaged(where, f"has {reader.size} bytes; expected {expect.bytes}, found {reader.size}")
    if reader.size < _LENGTH_BYTES:
        raise _damaged(where, f"has {reader.size} bytes; expected a header of at least {_LENGTH_BYTES}")
    length = bytearray(_LENGTH_BYTES)
    reader.read_into(0, memoryview(length))
    size = int.from_bytes(length, "little")
    header_bytes = _LENGTH_BYTES + size
    if size > min(reader.size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise _damaged(where, f"claims a header of {size} bytes in a file of {reader.size}; expected at most {MAX_HEADER_BYTES}")
    if expect is not None and header_bytes != expect.header_bytes:
        raise _damaged(where, f"has a header of {header_bytes} bytes; expected {expect.header_bytes}, found {header_bytes}")
    header = bytearray(header_bytes)
    reader.read_into(0, memoryview(header))
    if expect is not None and (found := sha256(memoryview(header))) != expect.header_sha256:
        raise _damaged(where, f"has a changed header: expected sha256 {expect.header_sha256}, found {found}")
    table = _parse(memoryview(header)[_LENGTH_BYTES:], where, cross_check=expect is None)
    if header_bytes + table.image_bytes != reader.size or len(table.digests) != table.blocks:
        raise _damaged(
            where,
            f"has {reader.size} bytes and {len(table.digests)} digests; expected {header_bytes + table.image_bytes} and {table.blocks}",
        )
    return table, header_bytes


def _parse(text: memoryview, where: str, cross_check: bool) -> TensorTable:
    try:
        table = msgspec.json.decode(msgspec.json.decode(text, type=_Header).metadata.ftckpt, type=TensorTable)
        seen = msgspec.json.decode(text, type=dict[str, msgspec.Raw]) if cross_check else {}
        theirs = {name: msgspec.json.decode(raw, type=_Section) for name, raw in seen.items() if name != RESERVED_NAME}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _damaged(where, f"has no readable ftckpt table in its safetensors header ({e})") from e
    if table.version != (REFERRING_VERSION if table.holders else TABLE_VERSION):
        raise Damaged(
            f"{where} has table version {table.version} with {len(table.holders)} files that it refers to;"
            f" this release reads {TABLE_VERSION} without and {REFERRING_VERSION} with such",
            todo="use a newer ftckpt",
        )
    check_table(table, where)
    if cross_check and theirs != _sections(table):  # otherwise the manifest's digest of the header vouches for it
        raise _damaged(where, "has a safetensors header that differs from its table")
    return table


def _damaged(where: str, text: str) -> Damaged:
    return Damaged(f"{where} {text}", now="none of its bytes were used", todo="take another generation, or `ftckpt verify` this one")

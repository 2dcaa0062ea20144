"""A peer as a process of its own: serves one made-up snapshot until its standard input ends. Run with JSON options."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import sys
import threading
import time
from typing import Any

import msgspec

from ftckpt.domain.trajectory import Trajectory
from ftckpt.format.table import Chunk, TensorEntry, TensorTable
from ftckpt.shm.near import Near, here
from ftckpt.transfer import ServerLimits, SnapshotDoc, SnapshotServer, server

SECRET = b"a secret of the test, 32 bytes.."
JOB = "heal-test"


def pattern(size: int, seed: int) -> bytearray:
    """``size`` bytes that differ from block to block."""
    piece = random.Random(seed).randbytes((1 << 16) + 13)
    return bytearray((piece * (size // len(piece) + 1))[:size])


def document(size: int, *, step: int = 5, name: str = "snap", block: int = 1 << 16, h: str = "ab" * 32) -> SnapshotDoc:
    """A document for ``size`` bytes, without digests."""
    entry = TensorEntry("w", "uint8", (size,), (Chunk((0,), (size,), 0, size),))
    table = TensorTable(image_bytes=size, block_bytes=block, tensors=(entry,))
    return SnapshotDoc(job=JOB, snapshot=name, trajectory=Trajectory(step, h), table=table, leaves=msgspec.Raw(b'{"n":1}'))


class Options(msgspec.Struct):
    size: int = 1 << 20
    seed: int = 1
    step: int = 5
    name: str = "snap"
    block: int = 1 << 16
    h: str = "ab" * 32
    host: str = "127.0.0.1"
    secret: str = SECRET.decode()
    delay: float = 0.0
    wait: float = 10.0
    digests_after: float = 0.0
    near: str = ""  # in shared memory, "told" as it is, or with one thing about it wrong


def shared(data: bytearray, how: str) -> tuple[memoryview, Near | None, mmap.mmap]:
    """The same bytes in shared memory, behind a page of something else, and what is told of it."""
    fd = os.memfd_create("peer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, mmap.PAGESIZE + len(data))
    memory = mmap.mmap(fd, mmap.PAGESIZE + len(data))
    memory[mmap.PAGESIZE :] = data
    if how != "may shrink":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    near = here(fd, mmap.PAGESIZE)
    wrong = {
        "boot": {"boot": "another"},
        "inode": {"inode": 1},
        "nobody": {"pid": 2**22 + 1},
        "beyond": {"begin": 2 * mmap.PAGESIZE},
        "odd": {"begin": mmap.PAGESIZE + 16},
        "negative": {"begin": -mmap.PAGESIZE},
    }
    if near is not None and how in wrong:
        near = msgspec.structs.replace(near, **wrong[how])
    return memoryview(memory)[mmap.PAGESIZE :], near, memory


def main() -> None:
    o = msgspec.json.decode(sys.argv[1], type=Options)
    made = server.digest_blocks

    def late(*args: Any, **options: Any) -> tuple[str, ...]:
        time.sleep(o.digests_after)
        return made(*args, **options)

    server.digest_blocks = late
    with SnapshotServer(o.host, 0, o.secret.encode(), JOB, limits=ServerLimits(wait_s=o.wait)) as serving:
        print(serving.url, flush=True)
        time.sleep(o.delay)
        image, near = memoryview(pattern(o.size, o.seed)), None
        doc = document(o.size, step=o.step, name=o.name, block=o.block, h=o.h)
        if o.near:
            image, near, memory = shared(pattern(o.size, o.seed), o.near)
            digests = made(image, o.block)
            doc = msgspec.structs.replace(doc, near=near, table=msgspec.structs.replace(doc.table, digests=digests))
            if o.near == "changed":  # after its digests were made
                memory[mmap.PAGESIZE + o.size // 2] ^= 1
        threading.Thread(target=serving.publish, args=(o.name, doc, image, lambda: None), daemon=True).start()
        while not serving.snapshots():  # it is served before its digests are made
            time.sleep(0.001)
        print("published", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

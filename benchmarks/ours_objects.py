"""An object store on loopback: what the agent's persisting adds to a raw upload of the same bytes; and saves that leave out what did not change."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import torch
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from ftckpt import Checkpointer, Never
from ftckpt.stores.objectfiles import PART_BYTES, PARTS_AT_ONCE
from state import build, flat

PATIENCE = 300.0
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}


@contextmanager
def _server() -> Iterator[str]:
    """An S3 protocol server of this process's own, with a bucket; its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ.update(KEYS)
        import boto3

        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="bench")
        yield f"{host}:{port}"
    finally:
        server.stop()


def raw(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The state's bytes as one object, in parts as large and as many at a time as ours, by the same library."""
    data = torch.cat([t.reshape(-1).view(torch.uint8) for t in flat(*build(mb)).values()]).numpy()
    with _server() as address:
        bucket = S3Store(
            "bench",
            endpoint=f"http://{address}",
            region="us-east-1",
            access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True},
        )
        while True:
            begun = time.perf_counter()
            obstore.put(bucket, "raw", memoryview(data), use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
            seconds = time.perf_counter() - begun
            obstore.delete(bucket, "raw")
            yield {"put": seconds}


def persist(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """From the return of ``save`` until the rank's part is in the object store, and until the record is in the log."""
    model, optimizer = build(mb)
    with _server() as address:
        root = f"s3://bench/ours?endpoint=http://{address}&region=us-east-1"
        log, run = f"sqlite://{folder}/log.sqlite3", str(folder / "run")
        with Checkpointer.open(job="bench", root=root, log=log, policy=Never(), runtime_dir=run, keep=1) as ckpt:
            ckpt.register(model=model, optimizer=optimizer)
            ckpt.resume()
            while True:
                ckpt.step()
                handle = ckpt.save()
                begun = time.perf_counter()
                handle.wait(PATIENCE, "persisted")
                persisted = time.perf_counter() - begun
                handle.wait(PATIENCE)
                yield {"persisted": persisted, "committed": time.perf_counter() - begun}


def _frozen(mb: int, folder: Path, *, reuse: bool) -> Iterator[dict[str, float]]:
    model, _ = build(mb)
    adapter = torch.nn.Linear(64, 64)
    (folder / "root").mkdir()
    options: dict[str, Any] = {"policy": Never(), "runtime_dir": str(folder / "run"), "reuse": reuse, "keep": 2}
    with Checkpointer.open(job="bench", root=folder / "root", **options) as ckpt:
        ckpt.register(model=model, adapter=adapter)
        ckpt.resume()
        ckpt.step()
        ckpt.save(wait=PATIENCE)  # the first one is whole
        while True:
            with torch.no_grad():
                adapter.weight.add_(1.0)
            ckpt.step()
            handle = ckpt.save()
            begun = time.perf_counter()
            handle.wait(PATIENCE)
            yield {"committed": time.perf_counter() - begun}


def frozen_whole(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """A frozen model with an adapter that trains, on files: every save whole."""
    yield from _frozen(mb, folder, reuse=False)


def frozen_reused(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The same, leaving out what did not change."""
    yield from _frozen(mb, folder, reuse=True)

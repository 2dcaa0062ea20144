"""What generation directories a root has, and of each whether it is complete, or what is missing. Reads names, sizes and manifests only."""

from __future__ import annotations

from collections.abc import Collection

from ftckpt.domain.lineage import Found
from ftckpt.domain.names import GenerationName, generation_dir, generations_dir, shard_file
from ftckpt.errors import ConfigError, Damaged, NotFound, StoreError
from ftckpt.format.manifest import ABANDONED, INTENT, MANIFEST, RECEIPTS, Intent, Manifest, Receipt, decode, sha256
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import tiers_of


def scan(store: BlobStore, job: str, *, without: Collection[str] = ()) -> tuple[Found, ...]:
    """All generation directories of a job, by step; whatever else lies there is not ours and is passed over.

    Args:
        without: names of directories that are not looked at.

    Raises:
        StoreError: the root cannot be listed.
    """
    there = (text for text in store.listdir(generations_dir(job)) if text not in without)
    names = [name for text in there if (name := GenerationName.parse(text)) is not None]
    return tuple(_looked(store, job, name) for name in sorted(names))


def _looked(store: BlobStore, job: str, name: GenerationName) -> Found:
    try:
        return look(store, job, name)
    except StoreError as e:
        return Found(location=str(name), step=name.step, why=f"it cannot be read now: {e.what}", unread=True)


def look(store: BlobStore, job: str, name: GenerationName) -> Found:
    """One generation directory: complete by names and sizes, or why not; with tiers in one of them, else in both together.

    Raises:
        StoreError: the store fails to give it, so that nothing is known of it.
    """
    tiers = tiers_of(store)
    if len(tiers) > 1:
        found = next((f for _, tier in tiers if (f := _looked(tier, job, name)).complete), None)
        if found is not None:
            return found
    location = str(name)
    base = generation_dir(job, location)
    try:
        sizes = {info.path.removeprefix(base + "/"): info.size for info in store.files(base)}
        if MANIFEST not in sizes:
            return Found(location=location, step=name.step, why=_unfinished(store, base, sizes))
        data = store.get(f"{base}/{MANIFEST}")
        manifest = decode(data, Manifest, f"{location}/{MANIFEST}")
    except (Damaged, NotFound, ConfigError) as e:
        return Found(location=location, step=name.step, why=e.what)
    return Found(
        location=location,
        step=name.step,
        why=_misnamed(manifest, job, name) or _misfit(manifest, sizes) or _lacking(store, job, manifest),
        trajectory=manifest.trajectory,
        log=manifest.log,
        known_tail=manifest.known_tail,
        manifest=sha256(data),
        via=manifest.via,
        refers=tuple(sorted({r.location for r in manifest.refers})),
    )


def _misnamed(manifest: Manifest, job: str, name: GenerationName) -> str:
    """Why the manifest is not of this directory; empty if it is."""
    if manifest.job != job:
        return f"{MANIFEST} is of job {manifest.job!r}"
    said = GenerationName(manifest.step, manifest.trajectory.h[:8], manifest.attempt)
    return "" if said == name else f"{MANIFEST} is of {said}"


def _misfit(manifest: Manifest, sizes: dict[str, int]) -> str:
    """The first file that is missing or has another size than the manifest says; empty if all fit."""
    expected = [(s.file, s.bytes) for s in manifest.shards]
    expected += [(f.file, f.bytes) for f in (manifest.leaves, *(c.file for c in manifest.cursors))]
    for file, size in expected:
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != size:
            return f"{file} has {sizes[file]} bytes, expected {size}"
    return ""


def _lacking(store: BlobStore, job: str, manifest: Manifest) -> str:
    """The first file of an earlier generation that it refers to and that is missing or has another size; empty if all fit."""
    sizes = {
        info.path: info.size for location in {r.location for r in manifest.refers} for info in store.files(generation_dir(job, location))
    }
    for r in manifest.refers:
        path = f"{generation_dir(job, r.location)}/{r.file}"
        if path not in sizes:
            return f"it has tensors in {r.location}/{r.file}, which is missing"
        if sizes[path] != r.bytes:
            return f"it has tensors in {r.location}/{r.file}, which has {sizes[path]} bytes, expected {r.bytes}"
    return ""


def _unfinished(store: BlobStore, base: str, sizes: dict[str, int]) -> str:
    """What an attempt without manifest has, and which ranks are missing."""
    if not sizes:
        return "the directory is empty"
    if ABANDONED in sizes:
        return f"its writer gave it up (no {MANIFEST})"
    if INTENT not in sizes:
        return f"no {MANIFEST} and no {INTENT}"
    try:
        ranks = decode(store.get(f"{base}/{INTENT}"), Intent, INTENT).group_world_size
        receipts = [decode(store.get(f"{base}/{file}"), Receipt, file) for file in sorted(sizes) if file.startswith(RECEIPTS + "/")]
    except (Damaged, NotFound, StoreError) as e:
        return f"no {MANIFEST}; {e.what}"
    failed = [f"rank {r.rank} failed: {r.error}" for r in receipts if r.error]
    alone = {0} if ranks == 1 and shard_file(0, 1) in sizes else set()  # a group of one leaves no receipt
    missing = sorted(set(range(ranks)) - {r.rank for r in receipts} - alone)
    parts = failed + ([f"the shard of rank {', '.join(map(str, missing))} never arrived"] if missing else [])
    return f"no {MANIFEST}; {'; '.join(parts) or 'all shards are there'}"

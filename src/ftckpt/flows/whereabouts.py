"""What the tiers of a root have of each generation, by names, sizes and manifests. Only reads; a root without tiers is one of them."""

from __future__ import annotations

from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import Found
from ftckpt.errors import StoreError
from ftckpt.flows.scan import scan
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import tiers_of


def seen_in(store: BlobStore, job: str) -> tuple[dict[str, dict[str, Found]], dict[str, str]]:
    """What each tier has, by tier (for a root without tiers ""; for one with tiers, under "" what both make together), and which do not answer.

    Raises:
        StoreError: a root without tiers, or every tier, cannot be listed.
    """
    held: dict[str, dict[str, Found]] = {}
    downs: dict[str, str] = {}
    tiers = tiers_of(store)
    for tier, one in tiers:
        try:
            held[tier] = {f.location: f for f in scan(one, job)}
        except StoreError as e:
            downs[tier] = e.what
            if len(downs) == len(tiers):
                raise
    if len(held) > 1:
        whole = {location for seen in held.values() for location, f in seen.items() if f.complete}
        held[""] = {f.location: f for f in scan(store, job)} if any(not whole.issuperset(seen) for seen in held.values()) else {}
    return held, downs


def union(held: dict[str, dict[str, Found]]) -> dict[str, Found]:
    """The best that any tier has of each directory."""
    found: dict[str, Found] = {}
    for seen in held.values():
        for location, f in seen.items():
            if location not in found or (f.complete and not found[location].complete):
                found[location] = f
    return found


def by_tier(entry: Entry, held: dict[str, dict[str, Found]], downs: dict[str, str]) -> dict[str, str]:
    """How a generation stands in each tier; empty for a root without tiers."""
    if entry.kind == "open" or (set(held) == {""} and not downs):
        return {}
    said = dict.fromkeys(downs, "does not answer")
    for tier, seen in held.items():
        if tier:
            here = seen.get(entry.location)
            said[tier] = "missing" if here is None else here.why or stands(entry, here.manifest)
    return said


def stands(entry: Entry, manifest: str) -> str:
    """How a complete directory stands to its record."""
    return "complete" if entry.manifest == manifest else "its manifest is not what the record vouches for"

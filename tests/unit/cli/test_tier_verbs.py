"""The verbs on a root with two tiers, with either of them away or damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt import cli
from ftckpt.flows.place import bring
from ftckpt.stores.tiered import TieredStore
from ftckpt.testing.generations import flip
from ftckpt.wiring import claim_root, open_root
from unit.flows.flowkit import JOB, World, world


class Verbs:
    """A job of two generations in both tiers, and the command line, told of the first tier alone."""

    def __init__(self, w: World, durable: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.w, self.durable, self._capfd = w, durable, capfd
        durable.mkdir()
        store = open_root(str(w.root), str(durable))
        assert isinstance(store, TieredStore)
        self.store = store
        claim_root(store, JOB, log=w.log.url, uuid=w.log.uuid())
        for entry in w.entries:
            bring(store, JOB, entry.location, entry)
            w.log.place(entry.index, "durable", store.durable.url)

    def __call__(self, *argv: str, root: Path | None = None, status: int = 0) -> str:
        self._capfd.readouterr()
        found = cli.call([*argv, "--root", str(root or self.w.root), "--log", self.w.log.url])
        self.out, self.err = self._capfd.readouterr()
        assert found == status, self.err
        return self.out

    def json(self, *argv: str, **options: Any) -> Any:
        return json.loads(self(*argv, "--json", **options))

    def away(self) -> None:
        self.durable.rename(self.durable.with_name("unmounted"))


@pytest.fixture
def verbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Verbs]:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith(("FTCKPT_", "TORCHFT_"))]:
        monkeypatch.delenv(name)
    with world(tmp_path / "first", 5, 10) as w:
        yield Verbs(w, tmp_path / "durable", capfd)


@pytest.mark.covers("F79")
def test_ls_says_it_of_each_tier(verbs: Verbs) -> None:
    shutil.rmtree(verbs.w.root / JOB / "generations" / verbs.w.entries[0].location)
    new, old = verbs.json("ls", JOB)["entries"]
    assert (new["tiers"], new["payload"]) == ({"first": "complete", "durable": "complete"}, "complete")
    assert (old["tiers"], old["payload"]) == ({"first": "missing", "durable": "complete"}, "complete")
    assert old["placements"] == {"durable": verbs.store.durable.url}
    assert "(first: missing, durable: complete)" in verbs("ls", JOB)
    assert verbs.json("ls", JOB, root=verbs.durable)["entries"][0]["tiers"] == {}


@pytest.mark.covers("F79", "I13")
def test_with_the_durable_tier_away_what_the_first_has_is_shown_and_chosen(verbs: Verbs) -> None:
    verbs.away()
    listed = verbs.json("ls", JOB)
    assert listed["entries"][0]["tiers"] == {"durable": "does not answer", "first": "complete"}
    assert any("tier durable does not answer" in text for text in listed["warnings"])
    assert verbs.json("resume", JOB, "--dry-run")["step"] == 10
    assert verbs.json("show", JOB)["entry"]["step"] == 10
    assert [report["sound"] for report in verbs.json("verify", JOB, "--all")] == [True, True]
    flip(verbs.store.first, verbs.w.path(verbs.w.entries[1], "leaves.json"), 10)
    verbs("resume", JOB, "--dry-run", status=10)
    assert "does not answer" in verbs.err


@pytest.mark.covers("I9", "F79")
def test_verify_takes_the_sound_copy_and_tells_of_the_damaged_one(verbs: Verbs) -> None:
    shard = verbs.w.path(verbs.w.entries[1], "shard-00000-of-00002.safetensors")
    flip(verbs.store.first, shard, -200)
    assert verbs.json("verify", JOB)[0]["sound"]
    flip(verbs.store.durable, shard, -200)
    verbs("verify", JOB, status=4)


@pytest.mark.covers("F79")
def test_show_status_and_du_tell_of_tiers(verbs: Verbs) -> None:
    assert f"in tier durable: {verbs.store.durable.url}" in verbs("show", JOB)
    verbs.w.log.displace(0, "durable")
    status = verbs.json("status", JOB)
    assert (status["placements"], status["unplaced"]) == ({"durable": verbs.store.durable.url}, 1)
    assert "1 generation is not in the durable tier yet" in verbs("status", JOB)
    assert verbs.json("status", JOB, root=verbs.durable)["unplaced"] == -1
    assert {r["tier"] for r in verbs.json("du", JOB)["rooms"]} == {"first", "durable"}


@pytest.mark.covers("I7")
def test_gc_removes_from_both_and_cp_does_not_pretend_to_be_a_tier(verbs: Verbs, tmp_path: Path) -> None:
    verbs("cp", JOB, str(tmp_path / "copy"), "--tier", "durable", status=2)
    verbs("cp", JOB, str(tmp_path / "copy"), "--tier", "tape")
    assert set(verbs.json("show", JOB)["placements"]) == {"durable", "tape"}
    assert verbs.json("gc", JOB, "--keep", "1", "--yes")["report"]["withdrawn"] == [0]
    left = [verbs.w.entries[1].location]
    assert os.listdir(verbs.w.root / JOB / "generations") == os.listdir(verbs.durable / JOB / "generations") == left


def test_doctor_looks_at_the_durable_tier(verbs: Verbs) -> None:
    verbs("doctor", JOB, "--json")
    checks = {c["name"]: c for c in json.loads(verbs.out)["checks"]}
    assert checks["durable tier"]["grade"] == "ok"
    verbs.away()
    verbs("doctor", JOB, "--json", status=1)
    checks = {c["name"]: c for c in json.loads(verbs.out)["checks"]}
    assert checks["durable tier"]["grade"] == "wrong"
    assert checks["resume"]["grade"] == "ok"

"""``ftckpt doctor`` and the other verbs against a real etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ftckpt.config import Launch, load
from ftckpt.flows.doctor import examine
from ftckpt.flows.doctor_etcd import Check
from ftckpt.flows.log_rebuild import plan_rebuild, rebuild
from ftckpt.flows.select import choose
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.generations import walk, write_generation
from ftckpt.wiring import claim_root, open_log, open_store

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as s:
        yield s


def looked(server: EtcdServer, root: Path) -> dict[str, Check]:
    settings = load({"job": "gpt", "root": str(root), "log": server.url}, env={})
    return {c.name: c for c in examine(settings, Launch())}


@pytest.mark.covers("F71")
def test_a_server_without_the_v2_api_is_told_with_what_to_do(server: EtcdServer, tmp_path: Path) -> None:
    checks = looked(server, tmp_path)
    host = server.endpoint
    assert checks[f"etcd {host}"].text.startswith("version 3.")
    v2 = checks[f"etcd {host} v2 API"]
    assert v2.grade == "note"
    assert "--rdzv-backend=etcd and etcd-v2 will fail" in v2.text
    assert "etcd-v3" in v2.todo
    assert checks[f"etcd {host} space"].grade == "ok"
    assert checks["commit log"].text.endswith("empty")


@pytest.mark.covers("F71", "F69")
def test_the_v2_api_and_a_nearly_used_up_quota_are_seen(tmp_path: Path) -> None:
    with EtcdServer(options=("--enable-v2", "--quota-backend-bytes=20000"), fsync=False) as server:
        checks = looked(server, tmp_path)
    assert checks[f"etcd {server.endpoint} v2 API"].grade == "ok"
    assert checks[f"etcd {server.endpoint} space"].grade == "wrong"
    assert "quota" in checks[f"etcd {server.endpoint} space"].todo


@pytest.mark.covers("F26", "I13", "F33")
def test_a_job_on_etcd_is_chosen_from_and_rebuilt_like_one_on_sqlite(server: EtcdServer, tmp_path: Path) -> None:
    store, log = open_store(str(tmp_path)), open_log(server.url, job="gpt", root_url=str(tmp_path))
    try:
        first = walk("gpt", 5)
        write_generation(store, log, "gpt", 5, {"model/w": np.arange(4.0)}, first)
        write_generation(store, log, "gpt", 9, {"model/w": np.arange(4.0)}, walk("gpt", 9, after=first))
        claim_root(store, "gpt", log=server.url, uuid=log.uuid())
        assert choose(log, store, "gpt", verify_level="full").step == 9
        plan = plan_rebuild(log, store, "gpt")
        uuid = rebuild(log, store, plan)
        assert [(e.step, e.log) for e in log.entries()] == [(5, uuid), (9, uuid)]
        assert choose(log, store, "gpt").step == 9
        other = open_log(server.url, job="other", root_url=str(tmp_path))
        assert other.entries() == []
        other.close()
    finally:
        log.close()

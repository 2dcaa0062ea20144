"""What heals cost a job of whole replicas that has no need of them: nothing."""

from __future__ import annotations

import pytest
from replicakit import ReplicaJob

from ftckpt.testing.etcd_server import have_etcd

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(240)]


@pytest.mark.covers("F55")
def test_a_healthy_replica_fetches_nothing_over_100_steps(job: ReplicaJob) -> None:
    light = job.light()
    lives = [job.start(name, light, "--every", 0, "--slow", 0.01, "--min-replicas", 2) for name in ("a", "b")]
    first = max(life.until(lambda life: [x for x in life.made() if x["members"] == 2])[0]["step"] for life in lives)
    for life in lives:
        life.until(lambda life: life.made() and life.made()[-1]["step"] >= first + 100)
        steps = [x for x in life.steps() if x["step"] > first]
        assert len(steps) >= 100
        assert [x for x in steps if x["healed"] or not x["committed"]] == []
    fetched = [e for e in job.log.events(limit=1000) if e.kind == "healed" and int(e.detail["step"]) >= first]
    assert fetched == []

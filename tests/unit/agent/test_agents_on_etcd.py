"""Real agents committing to a real etcd that is killed, paused, cut off, full, restored from a backup, or loses its leader."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_harness import Rig, Trainer, until

from ftckpt.domain.ledger import Entry
from ftckpt.errors import Diverged, LogRegressed
from ftckpt.flows.log_rebuild import plan_rebuild, rebuild
from ftckpt.link.config import AgentConfig
from ftckpt.ports import CommitLog
from ftckpt.testing.etcd_cluster import EtcdCluster
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.tcp_proxy import TcpProxy
from ftckpt.wiring import open_log

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH"), pytest.mark.timeout(150)]

LONG = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False, directory=tmp_path / "etcd" / "m0") as server:
        yield server


def on(rig: Rig, url: str, replica: str = "a", **changes: object) -> AgentConfig:
    values: dict[str, object] = {"log": url, "log_timeout_s": 1.0, "registry_ttl_s": 2.0, "commit_linger_s": 40.0, **changes}
    return rig.config(replica=replica, incarnation=f"i-{replica}", **values)


def opened(url: str, job: str = "job") -> CommitLog:
    return open_log(url, job=job, root_url="", timeout=5.0)


def entries(url: str, job: str = "job") -> list[Entry]:
    log = opened(url, job)
    try:
        return log.entries()
    finally:
        log.close()


def generations(rig: Rig) -> list[str]:
    return sorted(os.listdir(rig.tmp / "root/job/generations"))


def warned(trainer: Trainer, text: str) -> bool:
    return any(text in w.text for w in trainer.warnings)


@pytest.mark.covers("F65", "I13", "I2")
def test_generations_saved_while_etcd_is_killed_and_paused_are_committed_in_order(rig: Rig, server: EtcdServer) -> None:
    trainer = rig.trainer(on(rig, server.url)).attach()
    assert trainer.save().wait(LONG) == "committed"
    handles = []
    for harm, mend in ((server.kill, server.restart), (server.pause, server.resume)):
        harm()
        for _ in range(3):
            handles.append(trainer.save())
            assert handles[-1].wait(LONG, until="persisted") == "persisted"
        assert until(lambda: warned(trainer, "kept durable"), LONG)
        assert handles[-1].state == "persisted"
        trainer.warnings.clear()
        mend()
        assert [h.wait(LONG) for h in handles] == ["committed"] * len(handles)
    assert [e.step for e in entries(server.url)] == list(range(1, 8))


@pytest.mark.covers("F65", "I6")
def test_an_agent_that_starts_while_etcd_is_down_commits_when_it_comes(rig: Rig, server: EtcdServer) -> None:
    server.kill()
    trainer = rig.trainer(on(rig, server.url)).attach()
    handle = trainer.save()
    assert handle.wait(LONG, until="persisted") == "persisted"
    server.restart()
    assert handle.wait(LONG) == "committed"
    assert until(lambda: trainer.client.url, LONG), "it serves peers once the log has given it the job's secret"


@pytest.mark.covers("F67", "I3")
@pytest.mark.parametrize("way", ["superseded", "diverged"])
def test_a_writer_stopped_beyond_every_lease_is_refused_and_cleaned_up_and_the_job_goes_on(rig: Rig, server: EtcdServer, way: str) -> None:
    stopped = rig.trainer(on(rig, server.url, "a", registry_ttl_s=1.0)).attach()
    other = rig.trainer(on(rig, server.url, "b")).attach()
    for trainer in (stopped, other):
        trainer.client.live("live", trainer.at)
    log = opened(server.url)
    assert until(lambda: len(log.replicas()) == 2, LONG)
    os.kill(stopped.client.agent_pid, signal.SIGSTOP)
    late = stopped.save() if way == "superseded" else stopped.save(trajectory=far(stopped))
    nonce = 0 if way == "superseded" else 7
    for _ in range(2):
        assert other.save(trajectory=other.step(nonce)).wait(LONG) == "committed"
    other.client.live("live", other.at)
    assert until(lambda: [r.replica for r in log.replicas()] == ["b"], LONG), "its line has run out"
    os.kill(stopped.client.agent_pid, signal.SIGCONT)
    if way == "superseded":
        assert late.wait(LONG) == "dropped"
    else:
        with pytest.raises(Diverged, match=r"is not an ancestor of step 5.*split brain: b"):
            late.wait(LONG)
        assert until(lambda: stopped.client.stray, LONG)
    assert until(lambda: generations(rig) == sorted(e.location for e in log.entries()), LONG)
    assert other.save(trajectory=other.step(nonce)).wait(LONG) == "committed"
    assert [e.writer for e in log.entries()] == ["b"] * 3
    log.close()


@pytest.mark.covers("F58", "I2", "I3")
@pytest.mark.parametrize("first", ["the-one-begun-before", "the-other"])
def test_a_save_begun_before_the_role_moved_is_appended_if_no_later_step_came_first_else_superseded(
    rig: Rig, server: EtcdServer, first: str
) -> None:
    before, after = (rig.trainer(on(rig, server.url, name)).attach() for name in ("a", "b"))
    assert before.save().wait(LONG) == "committed"
    after.at = before.at
    os.kill(before.client.agent_pid, signal.SIGSTOP)
    begun = before.save()  # step 2, by the replica that has the role now; its agent gets to it later
    after.step()  # both make step 2
    later = None
    if first == "the-other":
        later = after.save()  # step 3, by the replica that has the role then
        assert later.wait(LONG) == "committed"
    os.kill(before.client.agent_pid, signal.SIGCONT)
    assert begun.wait(LONG) == ("dropped" if later else "committed")
    if later is None:
        assert after.save().wait(LONG) == "committed"
    found = [(e.step, e.writer) for e in entries(server.url)]
    assert found == [(1, "a"), *([] if later else [(2, "a")]), (3, "b")]
    assert until(lambda: len(generations(rig)) == len(found), LONG)


def far(trainer: Trainer) -> object:
    """Five steps on by itself."""
    for _ in range(5):
        trainer.step(nonce=99)
    return trainer.at


@pytest.mark.covers("F68", "I2")
def test_commits_whose_answers_are_lost_on_the_way_are_recognised_as_own(rig: Rig, server: EtcdServer) -> None:
    with TcpProxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        trainer = rig.trainer(on(rig, f"etcd://{proxy.endpoint}")).attach()
        assert trainer.save().wait(LONG) == "committed"
        handles = []
        for _ in range(4):
            proxy.swallow_answers(0.2)
            handles.append(trainer.save())
            time.sleep(1.0)  # some requests arrive, no answer does
            proxy.mend()
        assert [h.wait(LONG) for h in handles] == ["committed"] * 4
        found = entries(server.url)
    assert [(e.step, e.attempt) for e in found[1:]] == [(h.step, h.attempt) for h in handles]
    assert generations(rig) == sorted(e.location for e in found)


@pytest.mark.covers("F69", "I13")
def test_a_used_up_quota_is_said_and_what_was_saved_meanwhile_is_committed_later(rig: Rig) -> None:
    with EtcdServer(fsync=False, options=("--quota-backend-bytes=4194304",)) as server:
        trainer = rig.trainer(on(rig, server.url)).attach()
        assert trainer.save().wait(LONG) == "committed"
        fill_quota(server)
        handles = [trainer.save(), trainer.save()]
        assert [h.wait(LONG, until="persisted") for h in handles] == ["persisted"] * 2
        assert until(lambda: warned(trainer, "database space exceeded"), LONG)
        free_quota(server)
        assert [h.wait(LONG) for h in handles] == ["committed"] * 2
        assert [e.step for e in entries(server.url)] == [1, 2, 3]


def fill_quota(server: EtcdServer) -> None:
    block = "A" * 400_000
    for _ in range(60):
        try:
            server.post("/v3/kv/put", {"key": "Zm9v", "value": block})
        except OSError as e:
            if "exceeded" in str(e):
                return
            raise
    raise AssertionError("the quota was never used up")


def free_quota(server: EtcdServer) -> None:
    server.compact()
    server.post("/v3/maintenance/defragment", {}, timeout=20)
    alarms = server.post("/v3/maintenance/alarm", {"action": "GET", "alarm": "NOSPACE"})
    for alarm in alarms.get("alarms", []):
        server.post("/v3/maintenance/alarm", {"action": "DEACTIVATE", "alarm": "NOSPACE", "memberID": alarm["memberID"]})


@pytest.mark.covers("I2", "I3", "F65")
def test_killing_the_leader_while_agents_commit_loses_and_doubles_nothing(rig: Rig) -> None:
    with EtcdCluster(3, fsync=False) as cluster:
        trainers = [rig.trainer(on(rig, cluster.url, job=f"job{i}", runtime_dir=str(rig.tmp / f"run{i}"))).attach() for i in range(2)]
        stop, failed = threading.Event(), []
        saved: list[list[object]] = [[] for _ in trainers]

        def save(trainer: Trainer, handles: list[object]) -> None:
            try:
                while not stop.is_set():
                    handles.append(trainer.save())
                    time.sleep(0.05)
            except Exception as e:
                failed.append(e)

        threads = [threading.Thread(target=save, args=pair) for pair in zip(trainers, saved, strict=True)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(2):
                time.sleep(1.0)
                leader = cluster.leader()
                leader.kill()
                time.sleep(1.5)
                leader.restart()
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert failed == []
        for i, handles in enumerate(saved):
            assert {h.wait(LONG) for h in handles} == {"committed"}  # type: ignore[attr-defined]
            assert [e.attempt for e in entries(cluster.url, f"job{i}")] == [h.attempt for h in handles]  # type: ignore[attr-defined]
            assert len(handles) > 10


@pytest.mark.covers("F81", "I2", "I7")
def test_a_log_restored_from_a_backup_takes_nothing_until_it_is_rebuilt(rig: Rig, server: EtcdServer, tmp_path: Path) -> None:
    trainer = rig.trainer(on(rig, server.url)).attach()
    assert trainer.save().wait(LONG) == "committed"
    data, backup = tmp_path / "etcd" / "m0", tmp_path / "backup"
    server.kill()
    shutil.copytree(data, backup)
    server.restart()
    assert [trainer.save().wait(LONG) for _ in range(2)] == ["committed"] * 2
    server.kill()
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    server.restart()
    with pytest.raises(LogRegressed, match="#2 is known to have been there"):
        trainer.save().wait(LONG)
    assert [e.step for e in entries(server.url)] == [1]
    fresh = rig.trainer(on(rig, server.url, "b", runtime_dir=str(tmp_path / "elsewhere"))).attach()  # it knows only what its trainer knows
    fresh.at = trainer.at
    with pytest.raises(LogRegressed):
        fresh.save(known_tail=2).wait(LONG)
    assert len(generations(rig)) == 5, "nothing was removed"
    log, store = opened(server.url), rig.store()
    plan = plan_rebuild(log, store, "job")
    assert [e.step for e in plan.entries] == [1, 2, 3, 4, 5]
    rebuild(log, store, plan)
    trainer.at = fresh.at
    assert trainer.save().wait(LONG) == "committed"
    assert [e.step for e in log.entries()] == [1, 2, 3, 4, 5, 6]
    log.close()


@pytest.mark.covers("F80", "F63")
def test_after_an_outage_longer_than_every_lease_a_newcomer_does_not_disturb_the_job(rig: Rig, server: EtcdServer) -> None:
    a, b = (rig.trainer(on(rig, server.url, name)).attach() for name in ("a", "b"))
    log = opened(server.url)
    for trainer in (a, b):
        trainer.client.live("live", trainer.at)
    assert until(lambda: {r.replica for r in log.replicas()} == {"a", "b"}, LONG)
    server.pause()
    waiting = a.save()
    time.sleep(4.5)  # twice the time to live
    server.resume()
    newcomer = rig.trainer(on(rig, server.url, "c"))
    newcomer.client.live("joining", newcomer.at)
    assert waiting.wait(LONG) == "committed"
    b.at = a.at
    assert [trainer.save().wait(LONG) for trainer in (b,)] == ["committed"]
    for trainer in (a, b):
        trainer.client.live("live", b.at)
    assert until(lambda: {r.replica: r.state for r in log.replicas()} == {"a": "live", "b": "live", "c": "joining"}, LONG)
    assert [trainer.client.stray for trainer in (a, b, newcomer)] == [None] * 3
    assert until(lambda: {r.detail["standing"] for r in log.replicas() if r.state == "live"} == {"holds"}, LONG)
    log.close()


@pytest.mark.covers("F60")
def test_a_replica_killed_and_started_five_times_leaves_one_line(rig: Rig, server: EtcdServer) -> None:
    log = opened(server.url)
    for life in range(5):
        config = msgspec.structs.replace(on(rig, server.url, registry_ttl_s=1.5), incarnation=f"i{life}")
        trainer = rig.trainer(config)
        trainer.client.live("live", trainer.at)
        assert until(lambda life=life: [(r.replica, r.incarnation) for r in log.replicas()] == [("a", f"i{life}")], LONG)
        if life % 2:
            os.kill(trainer.client.agent_pid, signal.SIGKILL)
        else:
            trainer.close()
    assert until(lambda: log.replicas() == [], LONG)
    log.close()

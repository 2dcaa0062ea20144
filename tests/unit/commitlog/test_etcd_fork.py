"""Forks beside an open etcd log: the parent's log goes on, children do their own work, and none crashes or hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.testing.etcd_server import EtcdServer, have_etcd
from ftckpt.testing.log_world import dense

pytestmark = [pytest.mark.etcd, pytest.mark.skipif(not have_etcd(), reason="no etcd in PATH")]


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer(fsync=False) as server:
        yield server


def run(code: str, *arguments: str) -> str:
    """A fresh interpreter's output; a fork in the tests' own process would copy what other tests left there."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORKS = """
import os, sys
from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.errors import LogUnreachable
from ftckpt.testing.log_world import fill, generation, replica
log = EtcdLog.from_url(sys.argv[1], "forks")
fill(log, 1)
log.watch(lambda entry: None)
log.announce(replica("a"), ttl=30)
for i in range(40):
    child = os.fork()
    if child == 0:
        try:
            log.append(generation(99), expect_tail=i)
        except LogUnreachable as error:
            os._exit(3 if "forked" in error.what else 4)
        os._exit(5)
    log.append(generation(i + 2), expect_tail=i)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
log.close()
"""


@pytest.mark.covers("F70")
def test_a_child_forked_from_a_connected_parent_is_refused_and_the_parent_goes_on(server: EtcdServer) -> None:
    assert run(FORKS, server.url).split() == ["3"] * 40
    log = EtcdLog.from_url(server.url, "forks")
    dense(log.entries(), 41)
    log.close()


EARLY = """
import os, sys
from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.testing.log_world import commit, generation
log = EtcdLog.from_url(sys.argv[1], "early")
child = os.fork()
commit(log, generation(1, writer=str(child)))
log.close()
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.covers("F70")
def test_a_log_made_before_a_fork_is_used_by_both_if_nobody_had_connected(server: EtcdServer) -> None:
    assert run(EARLY, server.url).split() == ["0"]
    log = EtcdLog.from_url(server.url, "early")
    dense(log.entries(), 2)
    log.close()


LOADER = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
from ftckpt.commitlog.etcd import EtcdLog
from ftckpt.testing.log_world import generation, replica
class Numbers(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        return torch.tensor(i)
log = EtcdLog.from_url(sys.argv[1], "loader")
log.watch(lambda entry: None)
log.announce(replica("a"), ttl=30)
seen = []
for i, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=4, multiprocessing_context="fork")):
    seen += batch.tolist()
    if i % 20 == 0:
        log.append(generation(i + 1), expect_tail=i // 20 - 1)
log.close()
print(len(seen), len(set(seen)), i + 1)
"""


@pytest.mark.covers("F70")
def test_dataloader_workers_fork_beside_an_open_log(server: EtcdServer) -> None:
    assert run(LOADER, server.url).split() == ["400", "400", "100"]
    log = EtcdLog.from_url(server.url, "loader")
    dense(log.entries(), 5)
    log.close()

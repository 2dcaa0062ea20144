"""The agent run by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec
import pytest
from agent_harness import Rig, Trainer, until

from ftckpt.errors import AgentError
from ftckpt.link import launch
from proc import open_files


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ftckpt.agent", *arguments], capture_output=True, text=True, timeout=30)


def test_agent_started_by_hand_serves_a_trainer_that_comes_later(rig: Rig) -> None:
    config = rig.config()
    file = rig.tmp / "agent.json"
    file.write_bytes(msgspec.json.encode(config))
    process = subprocess.Popen([sys.executable, "-m", "ftckpt.agent", "--config", str(file)], stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: launch.paths_of(config).socket.exists(), 10.0)
        trainer: Trainer = rig.trainer(config)
        assert trainer.client.agent_pid == process.pid
        assert trainer.save().wait(10.0) == "committed"
        trainer.close()
        assert process.wait(10.0) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_second_agent_for_the_same_rank_is_refused(rig: Rig) -> None:
    trainer = rig.trainer()
    file = rig.tmp / "agent.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(trainer.config, start_timeout_s=0.3)))
    found = run("--config", str(file))
    assert found.returncode == 11
    assert "another agent for this rank is alive" in found.stderr
    assert trainer.save().wait(10.0) == "committed"


@pytest.mark.covers("I8")
def test_a_root_that_is_missing_is_refused_and_not_made(rig: Rig) -> None:
    file = rig.tmp / "agent.json"
    file.write_bytes(msgspec.json.encode(rig.config(root=(rig.tmp / "unmounted").as_uri())))
    found = run("--config", str(file))
    assert found.returncode == 3
    assert "unmounted does not exist" in found.stderr
    assert not (rig.tmp / "unmounted").exists()
    with pytest.raises(AgentError, match=r"ended at start with status 3: root .*unmounted does not exist\nNow") as e:
        rig.trainer(root=(rig.tmp / "unmounted").as_uri())
    assert (e.value.now, "create the directory; its output is in" in e.value.todo) == ("nothing was changed", True)


def test_configuration_that_cannot_be_used_names_every_field(rig: Rig) -> None:
    file = rig.tmp / "agent.json"
    file.write_bytes(msgspec.json.encode(rig.config(rank=3, world=2, nice=40, poll_s=0.0)))
    found = run("--config", str(file))
    assert found.returncode == 2
    assert all(word in found.stderr for word in ("rank=3", "nice=40", "poll_s=0.0"))


def test_agent_that_serves_nobody_listens_nowhere(rig: Rig) -> None:
    trainer = rig.trainer(host="").attach()
    assert trainer.client.url == ""
    with open(f"/proc/{trainer.client.agent_pid}/net/tcp") as f:
        listening = {line.split()[9] for line in f.readlines()[1:] if line.split()[3] == "0A"}
    held = open_files(trainer.client.agent_pid).values()
    assert not {f"socket:[{inode}]" for inode in listening} & set(held)
    trainer.client.publish("s1", slot=trainer.client.acquire_slot(1.0), layout=trainer.layout, trajectory=trainer.step())
    assert trainer.save().wait(10.0) == "committed"

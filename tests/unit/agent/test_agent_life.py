"""The agent as a process: it outlives its trainer, holds nothing that is not its own, ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from agent_harness import Rig, Trainer, ended, running, stop, table_of, until

from ftckpt.errors import AgentError, ConfigError, DeadlineExceeded, SaveFailed
from ftckpt.link import launch
from ftckpt.link import messages as m
from ftckpt.link.channel import Channel
from ftckpt.link.client import AgentClient, AgentConfig
from ftckpt.transfer.client import fetch
from proc import open_files

HERE = Path(__file__).parent


def start(rig: Rig, action: str, config: AgentConfig | None = None) -> subprocess.Popen[str]:
    file = rig.tmp / f"{action}.json"
    file.write_bytes(msgspec.json.encode(config or rig.config()))
    return subprocess.Popen(
        [sys.executable, str(HERE / "trainer_process.py"), str(file), action], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def sockets(pid: int) -> int:
    return sum(shown.startswith("socket:") for shown in open_files(pid).values())


def outcome(rig: Rig, process: subprocess.Popen[str], timeout: float = 20.0) -> list[int]:
    out, _ = process.communicate(timeout=timeout)
    numbers = [int(word) for word in out.split()]
    rig.pids.add(numbers[0])
    return numbers


@pytest.mark.covers("I6")
def test_generation_is_committed_though_the_trainer_was_killed_right_after_save(rig: Rig) -> None:
    process = start(rig, "save-and-die")
    (pid,) = outcome(rig, process)
    assert process.returncode == -signal.SIGKILL
    assert ended(pid, 10.0)
    assert [e.step for e in rig.entries()] == [1]


@pytest.mark.covers("I6", "F70")
def test_agent_notices_the_trainers_death_though_a_forked_child_lives_on(rig: Rig) -> None:
    process = start(rig, "save-fork-and-die")
    line = process.stdout.readline()
    pid, child = (int(word) for word in line.split())
    rig.pids.add(pid)
    try:
        assert ended(pid, 10.0)
        assert running(child)
        assert [e.step for e in rig.entries()] == [1]
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate(timeout=10.0)


@pytest.mark.covers("F18")
def test_generation_is_committed_though_the_trainer_just_exits(rig: Rig) -> None:
    process = start(rig, "save-and-exit")
    (pid,) = outcome(rig, process)
    assert process.returncode == 0
    assert ended(pid, 10.0)
    assert [e.step for e in rig.entries()] == [1]


@pytest.mark.covers("I6")
def test_agent_does_not_hold_the_trainers_output_open(rig: Rig) -> None:
    config = rig.config(linger_s=8.0)
    process = start(rig, "save-and-die", config)
    (pid,) = outcome(rig, process, timeout=6.0)  # communicate() returns at the end of the pipe
    assert running(pid)
    held = set(open_files(pid).values())
    assert "/dev/null" in held
    assert len([f for f in held if f.startswith("pipe:")]) == 1  # its own, for waking up


@pytest.mark.covers("I6")
def test_agent_has_its_own_session_and_no_torch(rig: Rig) -> None:
    trainer = rig.trainer()
    trainer.save().wait(10.0)
    pid = trainer.client.agent_pid
    assert os.getsid(pid) == pid
    assert os.getpgid(pid) == pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" not in maps
    assert "numpy" not in maps


def test_agents_modules_import_without_torch() -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'numpy', 'torchft'): raise ImportError('blocked: ' + name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import ftckpt.agent.__main__, ftckpt.link.client, ftckpt.stores.local, ftckpt.commitlog.sqlite, ftckpt.commitlog.memory\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.covers("F21", "I11")
def test_killed_agent_gives_a_clear_error_and_training_goes_on_with_a_new_one(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    trainer.save().wait(10.0)
    os.kill(trainer.client.agent_pid, signal.SIGSTOP)
    handle = trainer.save()
    os.kill(trainer.client.agent_pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(AgentError, match="is lost"):
        handle.wait(10.0)
    assert time.monotonic() - began < 3.0
    with pytest.raises(AgentError):
        trainer.client.acquire_slot(5.0)
    trainer.client = trainer.client.reopen()
    rig.pids.add(trainer.client.agent_pid)
    assert trainer.client.arena is trainer.arena
    assert trainer.save().wait(10.0) == "committed"
    assert [e.step for e in rig.entries()] == [1, 3]


@pytest.mark.covers("F21", "I14")
def test_what_failed_before_an_agent_died_and_what_died_with_it_are_both_told(rig: Rig) -> None:
    trainer = rig.trainer().attach()
    os.kill(trainer.client.agent_pid, signal.SIGSTOP)
    failed, lost = trainer.save(), trainer.save()
    trainer.client._inbox.take(m.Failed(ordinal=failed.ordinal, error="SaveFailed", what="disk full", now="", todo=""))
    os.kill(trainer.client.agent_pid, signal.SIGKILL)
    assert until(lambda: lost.done, 10.0)
    trainer.client = trainer.client.reopen()
    rig.pids.add(trainer.client.agent_pid)
    with pytest.raises(SaveFailed, match="disk full"):
        trainer.client.raise_pending()
    with pytest.raises(AgentError, match="is lost"):
        trainer.client.raise_pending()
    trainer.client.raise_pending()


@pytest.mark.covers("F21", "I11")
def test_stopped_agent_blocks_training_only_up_to_the_deadline(rig: Rig) -> None:
    trainer = rig.trainer(send_timeout_s=0.5).attach()
    trainer.save().wait(10.0)
    os.kill(trainer.client.agent_pid, signal.SIGSTOP)
    handle = trainer.save()
    with pytest.raises(DeadlineExceeded):
        handle.wait(0.2)
    began = time.monotonic()
    with pytest.raises(AgentError, match=r"took no message for 0\.5 s"):
        trainer.client.draw(1, b"x" * 4_000_000)
    assert time.monotonic() - began < 5.0
    assert not trainer.client.alive


@pytest.mark.covers("I6")
def test_new_trainer_finds_the_living_agent_of_one_that_died(rig: Rig) -> None:
    config = rig.config(linger_s=10.0)
    (pid,) = outcome(rig, start(rig, "save-and-die", config))
    trainer = rig.trainer(msgspec.structs.replace(config, incarnation="i2", linger_s=0.2))
    assert (trainer.client.agent_pid, trainer.client.reattached) == (pid, True)
    assert until(lambda: trainer.client.tail is not None, 5.0)
    trainer.step(), trainer.step()
    rig.manifest(trainer.client.tail.location)
    trainer.at = rig.manifest(trainer.client.tail.location).trajectory
    assert trainer.save().wait(10.0) == "committed"


@pytest.mark.covers("I3", "I6", "F67")
def test_stopped_trainer_is_replaced_and_what_it_says_later_is_not_taken(rig: Rig) -> None:
    config = rig.config(linger_s=1.0)
    process = start(rig, "save-and-wait", config)
    pid = int(process.stdout.readline())
    rig.pids.add(pid)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        trainer = rig.trainer(msgspec.structs.replace(config, incarnation="i2"))
        assert trainer.client.reattached
        trainer.at = rig.manifest(trainer.client.tail.location).trajectory
        assert trainer.save().wait(10.0) == "committed"
        os.kill(process.pid, signal.SIGCONT)
        assert trainer.save().wait(10.0) == "committed"
        assert [e.step for e in rig.entries()] == [1, 2, 3]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10.0)


@pytest.mark.covers("I14", "F67", "F48")
def test_replaced_trainer_is_told_by_whom_and_what_to_do_and_does_not_take_the_agent_back(rig: Rig) -> None:
    config = rig.config()
    old, new = rig.trainer(config), rig.trainer(config)
    assert new.client.agent_pid == old.client.agent_pid
    assert until(lambda: not old.client.alive, 5.0)
    for call in (old.client.reopen, lambda: old.client.draw(1, b"{}")):
        with pytest.raises(
            AgentError, match=rf"two processes train as one rank: process {os.getpid()} took over rank 0 of replica a"
        ) as told:
            call()
        assert "FTCKPT_REPLICA" in told.value.todo
        assert "saves nothing" in told.value.now
    assert new.client.alive
    assert until(lambda: any(w.kind == "takeover" and f"process {os.getpid()}" in w.text for w in new.warnings), 5.0)


def test_starters_at_the_same_time_share_one_agent(rig: Rig) -> None:
    found: list[AgentClient] = []
    threads = [threading.Thread(target=lambda: found.append(AgentClient.open(rig.config()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    rig.pids |= {client.agent_pid for client in found}
    for client in found:
        client.close(1.0)
    assert len(found) == 4
    assert len(rig.pids) == 1


def test_agent_of_another_configuration_is_another_process(rig: Rig) -> None:
    one, two = rig.trainer(replica="a"), rig.trainer(replica="b")
    assert one.client.agent_pid != two.client.agent_pid
    assert set(launch.living(rig.tmp / "run").values()) == {one.client.agent_pid, two.client.agent_pid}


@pytest.mark.covers("I10")
def test_runtime_directory_that_others_may_write_to_is_refused(rig: Rig) -> None:
    (rig.tmp / "run").mkdir(mode=0o777)
    (rig.tmp / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="mode 777"):
        rig.trainer()


@pytest.mark.covers("I10")
def test_socket_and_output_are_for_this_user_alone(rig: Rig) -> None:
    trainer = rig.trainer()
    paths = launch.paths_of(trainer.config)
    assert paths.socket.parent.stat().st_mode & 0o777 == 0o700
    assert paths.socket.stat().st_mode & 0o777 == 0o600
    assert paths.output.stat().st_mode & 0o777 == 0o600


@pytest.mark.covers("I11")
def test_agent_whose_starter_died_meanwhile_says_so_in_one_line_and_ends_by_itself(rig: Rig) -> None:
    config = rig.config(start_timeout_s=60.0)
    output = launch.paths_of(config).output
    file = rig.tmp / "agent.json"
    file.write_bytes(msgspec.json.encode(config))
    output.parent.mkdir(mode=0o700, parents=True)
    ready_r, ready_w = os.pipe()
    with output.open("wb") as told:
        agent = subprocess.Popen(
            [sys.executable, "-m", "ftckpt.agent", "--config", str(file), "--ready-fd", str(ready_w)], stderr=told, pass_fds=(ready_w,)
        )
    with agent:
        os.close(ready_r)
        os.close(ready_w)
        try:
            assert agent.wait(20.0) == 0
        finally:
            agent.kill()
    lines = output.read_text().splitlines()
    assert len([line for line in lines if "the process that started this agent has ended" in line]) == 1
    assert "Traceback" not in output.read_text()


@pytest.mark.covers("F65")
def test_agent_that_cannot_start_says_why_at_once(rig: Rig) -> None:
    with pytest.raises(AgentError, match="nosuch"):
        rig.trainer(log="nosuch://x")


@pytest.mark.covers("I11")
def test_agent_ends_by_itself_after_its_trainer(rig: Rig) -> None:
    trainer = rig.trainer(linger_s=0.2)
    trainer.save().wait(10.0)
    trainer.close()
    assert ended(trainer.client.agent_pid, 5.0)
    assert not launch.paths_of(trainer.config).socket.exists()
    assert "nothing left to do" in rig.output(trainer.config)


@pytest.mark.covers("F77")
def test_sigterm_lets_an_attached_trainer_finish_within_the_budget(rig: Rig) -> None:
    trainer = rig.trainer(term_budget_s=5.0).attach()
    os.kill(trainer.client.agent_pid, signal.SIGTERM)
    time.sleep(0.3)
    assert trainer.save().wait(5.0) == "committed"
    trainer.close()
    assert ended(trainer.client.agent_pid, 5.0)


@pytest.mark.covers("F77", "I11")
def test_sigterm_ends_the_agent_at_its_budget_even_with_a_trainer(rig: Rig) -> None:
    trainer = rig.trainer(term_budget_s=0.5)
    began = time.monotonic()
    os.kill(trainer.client.agent_pid, signal.SIGTERM)
    assert ended(trainer.client.agent_pid, 5.0)
    assert time.monotonic() - began < 3.0


@pytest.mark.covers("I14")
def test_dead_worker_thread_ends_the_process_with_its_trace(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An error that is not ours, in the one thread whose state nobody knows after it: it may have been in the middle of an append.
    slip = "import ftckpt.agent.commit as c\ndef judge(*a, **k):\n    raise ZeroDivisionError('a slip')\nc.judge = judge\n"
    (tmp_path / "sitecustomize.py").write_text(slip)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    trainer = rig.trainer().attach()
    with pytest.raises(AgentError):
        trainer.save().wait(10.0)
    assert "ZeroDivisionError: a slip" in rig.output(trainer.config)
    assert ended(trainer.client.agent_pid, 5.0)


@pytest.mark.covers("I13")
def test_published_snapshot_outlives_its_trainer(rig: Rig) -> None:
    config = rig.config(linger_s=10.0)
    outcome(rig, start(rig, "publish-and-die", config))
    trainer = rig.trainer(msgspec.structs.replace(config, linger_s=0.2))
    assert trainer.client.reattached
    log = rig.log()
    fetched = fetch(
        [trainer.client.url], 1, "job", log.secret(b"another candidate"), lambda doc: memoryview(bytearray(doc.table.image_bytes))
    )
    log.close()
    assert bytes(fetched.image) == b"\5" * trainer.table.image_bytes


def test_forked_child_cannot_use_the_link(rig: Rig) -> None:
    trainer: Trainer = rig.trainer().attach()
    child = os.fork()
    if child == 0:
        try:
            trainer.client.note("x", "y")
        except AgentError:
            os._exit(42)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42
    assert trainer.save().wait(10.0) == "committed"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel gives sessions no shares of their own")
def test_agent_is_lowered_against_the_trainers_session_while_it_persists(rig: Rig) -> None:
    own = Path("/proc/self/autogroup").read_text()
    trainer = rig.trainer(nice=7)
    told = Path(f"/proc/{trainer.client.agent_pid}/autogroup")
    assert told.read_text().split()[-1] == "0"
    trainer.table = table_of(30_000_000)
    seen, handle = set[str](), trainer.attach(1).save()
    while not handle.done:
        seen.add(told.read_text().split()[-1])
    assert handle.wait(10.0) == "committed"
    assert "7" in seen
    assert until(lambda: told.read_text().split()[-1] == "0", 5.0)
    assert Path("/proc/self/autogroup").read_text() == own


@pytest.mark.covers("I6", "I11")
def test_the_death_of_a_trainer_says_nothing_of_the_one_that_took_its_place_at_that_moment(rig: Rig) -> None:
    config = rig.config(linger_s=8.0)
    process = start(rig, "save-and-stay", config)
    pid = int(process.stdout.readline())
    rig.pids.add(pid)
    before = sockets(pid)
    sock = launch.connect(launch.paths_of(config).socket)
    assert until(lambda: sockets(pid) > before, 10.0)  # it is let in, and has still to greet
    stop(pid)  # it will learn of both at once, in this order
    channel: Channel[m.ToTrainer] = Channel(sock, m.ToTrainer, "agent")
    channel.send(m.Hello(pid=os.getpid(), job="job", replica="a", rank=0, group_world_size=1, incarnation="i2", config=b""), timeout=5.0)
    process.kill()
    process.communicate(timeout=10.0)
    os.kill(pid, signal.SIGCONT)
    answers: list[object] = []
    assert until(lambda: answers.extend(channel.receive(0.1)) or any(isinstance(a, m.Welcome) for a in answers), 10.0)
    channel.send(m.Drain(token=1), timeout=5.0)
    assert until(lambda: answers.extend(channel.receive(0.1)) or any(isinstance(a, m.Drained) for a in answers), 10.0)
    channel.send(m.Bye(), timeout=5.0)
    channel.close()
    assert ended(pid, 10.0)

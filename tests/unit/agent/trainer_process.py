"""A trainer in a process of its own: ``python trainer_process.py CONFIG.json ACTION``. Prints one line when the action is done."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from agent_harness import LARGE, Trainer, pattern, table_of

from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.link.client import AgentConfig


def main(config_file: str, action: str) -> None:
    config = msgspec.json.decode(Path(config_file).read_bytes(), type=AgentConfig)
    trainer = Trainer(config)
    pid = trainer.client.agent_pid
    if action == "save-and-die":
        trainer.save(fill=9)
        print(pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "save-and-exit":
        trainer.save(fill=9)
        print(pid, flush=True)
    elif action == "save-fork-and-die":
        trainer.save(fill=9)
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        print(pid, child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "publish-and-die":
        trainer.attach().arena.slot(0)[:] = b"\5" * trainer.table.image_bytes
        trainer.client.publish("s1", slot=0, layout=trainer.layout, trajectory=trainer.step())
        print(pid, flush=True)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "save-thrice":  # images of a few blocks
        trainer.table = table_of(LARGE, f"model/w{config.rank}")
        if (tail := trainer.client.tail) is not None:  # go on from there
            trainer.at = Trajectory(tail.step, tail.trajectory)
        for number in (1, 2, 3):
            trainer.save(fill=pattern(trainer.table.image_bytes, number)).wait(20.0)
        print(pid, flush=True)
        for word in map(str.strip, sys.stdin):
            if word == "save":
                trainer.save(fill=pattern(trainer.table.image_bytes, 4))
            elif word == "stray":  # a state of another history, which is never committed
                trainer.at = genesis("job")
                for _ in range(4):
                    trainer.step(nonce=7)
                trainer.save(fill=pattern(trainer.table.image_bytes, 4), trajectory=trainer.at)
            elif word == "leave":  # without a word, and go on
                trainer.client._channel.close()
            elif word == "overwrite":  # as a capture that is under way
                trainer.arena.slot(0)[: 1 << 20] = trainer.arena.slot(1)[: 1 << 20] = bytes(1 << 20)
            slots = [trainer.arena.slot(i) for i in (0, 1)]
            print(word, sum(len(slot) - bytes(slot).count(0) for slot in slots), flush=True)
        time.sleep(60)
    else:
        trainer.save(fill=9).wait(10.0)
        print(pid, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])

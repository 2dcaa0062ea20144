"""A trainer in a process of its own: ``python trainer_process.py CONFIG.json ACTION``. Prints one line when the action is done."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from agent_harness import Trainer

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
    else:
        trainer.save(fill=9).wait(10.0)
        print(pid, flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])

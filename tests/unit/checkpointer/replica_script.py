"""One torchft replica of a small job, run as a process of its own: prints a line of JSON per event, ends with its error's exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from torchft import ProcessGroupGloo  # noqa: E402

from ftckpt import Checkpointer, Every, Never, digest_of  # noqa: E402
from ftckpt.errors import FtckptError  # noqa: E402
from ftckpt.trainer.replicas.hooks import ddp  # noqa: E402
from ftckpt.trainer.replicas.torchft import Timeouts  # noqa: E402


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def hold_heals(manager: Any, until: Path) -> None:
    """Say that a state is about to be fetched, and fetch it only once there is a file."""
    transport = manager._checkpoint_transport
    fetch = transport.recv_checkpoint

    def held(**options: Any) -> Any:
        say(event="healing", step=options["step"])
        end = time.monotonic() + 30
        while not until.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return fetch(**options)

    transport.recv_checkpoint = held


def main() -> None:
    p = argparse.ArgumentParser()
    for name in ("--root", "--commit-log", "--replica", "--lighthouse"):
        p.add_argument(name, required=True)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--every", type=int, default=5)
    p.add_argument("--slow", type=float, default=0.1)
    p.add_argument("--min-replicas", type=int, default=1)
    p.add_argument(
        "--late-error", type=int, default=0
    )  # fail the vote of the first step from this one on that two make, after its gradient went out
    p.add_argument("--vote-error", type=int, default=0)  # the step whose vote raises
    p.add_argument("--stop-after", type=int, default=0)  # SIGSTOP itself after the first step from this one on that two made
    p.add_argument("--hold-heals", type=Path, default=None)
    p.add_argument("--seed", type=int, default=3)  # of the first weights
    p.add_argument("--ddp", action="store_true")
    p.add_argument("--sync-quorum", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    model: nn.Module = nn.Linear(8, 1)
    if a.ddp:
        model = ddp(model)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    policy = Every(a.every) if a.every else Never()
    with Checkpointer.open(job="job", root=a.root, log=a.commit_log, replica=a.replica, policy=policy) as ckpt:
        manager = ckpt.torchft_manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=a.min_replicas, allow_split=True, lighthouse=a.lighthouse,
            store_addr="127.0.0.1", store_port=store.port, timeouts=Timeouts(heartbeat=1.0, join=3.0, quorum=15.0, step=5.0, connect=5.0),
            use_async_quorum=not a.sync_quorum,
        )  # fmt: skip
        ckpt.hook(model)

        def fail_late() -> None:
            """After this step's gradient went out; the others have it, and hold their votes meanwhile."""
            if a.late_error and ckpt.current_step >= a.late_error - 1 and manager.num_participants() == 2:
                a.late_error = 0
                time.sleep(1.0)
                manager.report_error(RuntimeError("late error"))

        manager.before_vote(fail_late)
        optimizer = ckpt.optimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        ckpt.register(model=model, optimizer=optimizer)
        report = ckpt.resume()
        if a.hold_heals is not None:
            hold_heals(manager, a.hold_heals)
        data = torch.Generator().manual_seed(zlib.crc32(a.replica.encode()))  # so that no two replicas have the same gradients
        say(event="resumed", source=report.source, step=report.step, params=digest_of(model))
        while ckpt.current_step < a.steps:
            optimizer.zero_grad()
            model(torch.randn(4, 8, generator=data)).square().mean().backward()
            if a.vote_error and ckpt.current_step == a.vote_error - 1:
                manager._client._inner = None  # the group's server is gone: the vote itself raises
            optimizer.step()
            out = ckpt.step()
            say(
                event="step", committed=out.committed, step=out.step, members=len(out.members), healed=out.healed, h=ckpt.trajectory.h,
                params=digest_of(model), reasons=out.reasons,
            )  # fmt: skip
            if a.stop_after and out.committed and out.step >= a.stop_after and len(out.members) == 2:
                a.stop_after = 0
                say(event="stopping", step=out.step, h=ckpt.trajectory.h, params=digest_of(model))
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(a.slow)
    say(event="closed")


if __name__ == "__main__":
    try:
        main()
    except FtckptError as e:
        say(event="error", kind=type(e).__name__, text=str(e))
        sys.exit(e.exit_code)

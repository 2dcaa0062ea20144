"""One torchft replica of a small job, run as a process of its own: prints a line of JSON per event, ends with its error's exit code."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from datetime import timedelta

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from torchft import ProcessGroupGloo  # noqa: E402

from ftckpt import Checkpointer, Every, Never, digest_of  # noqa: E402
from ftckpt.errors import FtckptError  # noqa: E402
from ftckpt.trainer.replicas.torchft import Timeouts  # noqa: E402


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    p = argparse.ArgumentParser()
    for name in ("--root", "--commit-log", "--replica", "--lighthouse"):
        p.add_argument(name, required=True)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--every", type=int, default=5)
    p.add_argument("--slow", type=float, default=0.1)
    p.add_argument("--min-replicas", type=int, default=1)
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Linear(8, 1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    policy = Every(a.every) if a.every else Never()
    with Checkpointer.open(job="job", root=a.root, log=a.commit_log, replica=a.replica, policy=policy) as ckpt:
        ckpt.torchft_manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=a.min_replicas, allow_split=True, lighthouse=a.lighthouse,
            store_addr="127.0.0.1", store_port=store.port, timeouts=Timeouts(heartbeat=1.0, join=3.0, quorum=15.0, step=5.0, connect=5.0),
        )  # fmt: skip
        ckpt.hook(model)
        optimizer = ckpt.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        ckpt.register(model=model, optimizer=optimizer)
        report = ckpt.resume()
        say(event="resumed", source=report.source, step=report.step, params=digest_of(model))
        while ckpt.current_step < a.steps:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            out = ckpt.step()
            say(
                event="step", committed=out.committed, step=out.step, members=len(out.members), healed=out.healed, h=ckpt.trajectory.h,
                params=digest_of(model), reasons=out.reasons,
            )  # fmt: skip
            time.sleep(a.slow)
    say(event="closed")


if __name__ == "__main__":
    try:
        main()
    except FtckptError as e:
        say(event="error", kind=type(e).__name__, text=str(e))
        sys.exit(e.exit_code)

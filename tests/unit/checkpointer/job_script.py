"""A small training job for tests, run as a process of its own: prints a line of JSON per event."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from ftckpt import AtEnd, Checkpointer, Every, Never, Warned, digest_of  # noqa: E402
from ftckpt.errors import FtckptError  # noqa: E402


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def save(ckpt: Checkpointer, lose_agent: bool) -> None:
    client = ckpt._rank.session.client
    if lose_agent:
        os.kill(client.agent_pid, signal.SIGKILL)
        while client.alive:
            time.sleep(0.01)
    try:
        say(event="saved", step=ckpt.save().step)
    except FtckptError as e:
        say(event="failed", kind=type(e).__name__, text=str(e))
        ckpt.save(wait=True)  # the same save, which its failure has not undone
        say(event="again", step=ckpt.current_step)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--root", required=True)
    p.add_argument("--commit-log", default=None)
    p.add_argument("--job", default="job")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--every", type=int, default=5)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--fresh", action="store_true")
    p.add_argument("--resume-step", type=int, default=None)
    p.add_argument("--slow", type=float, default=0.0)  # seconds after each step
    p.add_argument("--then", default="")  # what to do after the last step: kill, raise, wait, unstorable
    p.add_argument("--save-at", type=int, default=0)  # a step whose state the script itself saves
    p.add_argument("--lose-agent", action="store_true")  # right before
    a = p.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, a.width), nn.BatchNorm1d(a.width), nn.Dropout(0.1), nn.Linear(a.width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    points = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = StatefulDataLoader(
        torch.utils.data.TensorDataset(torch.arange(256), points), batch_size=8, shuffle=True, num_workers=a.workers,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    policy = Every(a.every) | AtEnd() if a.every else Never()
    with Checkpointer.open(job=a.job, root=a.root, log=a.commit_log, policy=policy) as ckpt:
        ckpt.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        ckpt.on(Warned, lambda e: say(event="warned", step=e.step, kind=e.kind, text=e.text, waiting=e.waiting))
        if a.then == "unstorable":
            ckpt.register(odd={"value": lambda: None})
        report = ckpt.resume(fresh=a.fresh, step=a.resume_step)
        if a.then == "late":
            ckpt.register(late={"value": 1})
        say(event="resumed", source=report.source, step=report.step, params=digest_of(model), passed_over=report.passed_over)
        if report.states is not None:
            say(event="read", memory=report.states.memory_bytes, store=report.states.store_bytes, all=report.states.bytes)
        if ckpt.current_step < a.steps:
            for ids, x in ckpt.batches("loader"):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                ckpt.step()
                say(
                    event="step",
                    step=ckpt.current_step,
                    loss=loss.item(),
                    lr=scheduler.get_last_lr()[0],
                    ids=ids.tolist(),
                    params=digest_of(model),
                )
                if ckpt.current_step == a.save_at:
                    save(ckpt, a.lose_agent)
                if ckpt.current_step >= a.steps:
                    break
                time.sleep(a.slow)
        if a.then == "save-kill":
            handle = ckpt.save()
            say(event="saved", step=handle.step)
            os.kill(os.getpid(), signal.SIGKILL)
        if a.then == "raise":
            raise ValueError("training's own error")
        if a.then == "wait":
            say(event="waiting")
            sys.stdin.readline()
    say(event="closed")


if __name__ == "__main__":
    try:
        main()
    except FtckptError as e:
        say(event="error", kind=type(e).__name__, text=str(e))
        sys.exit(e.exit_code)

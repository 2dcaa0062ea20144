"""``ftckpt unpin JOB [GENERATION]``: give a generation back to the policy."""

from __future__ import annotations

from ftckpt.cli import common
from ftckpt.cli.pin import Step, Which


def unpin(
    job: common.Job = None,
    generation: Which = None,
    step: Step = None,
    root: common.Root = None,
    log: common.Log = None,
    config: common.Config = None,
    timeout: common.Timeout = None,
    json: common.Json = False,
) -> None:
    """Take a generation's pin away; the policy decides about it from now on."""
    from ftckpt.flows.pin import unpin as flow

    common.one_of(generation=generation, step=step)
    with common.opened(job, root, log, config, timeout) as parts:
        job = parts.job
        entry, had = flow(parts.log, job, generation, step=step)
    if json:
        common.print_json({"entry": entry, "pinned": False, "was_pinned": had})
    else:
        print(f"#{entry.index} (step {entry.step}, {entry.location}) {'is not pinned any more' if had else 'was not pinned'}")

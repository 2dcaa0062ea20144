"""Jobs saved by the real Checkpointer (its agent included), for tests that read them in other ways."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from ftckpt import Checkpointer
from ftckpt.domain.policy import Never


@contextmanager
def opened(folder, job="gpt", *, policy=None, **options):
    """A checkpointer of a job below ``folder``, whose agent leaves nothing elsewhere."""
    (folder / "root").mkdir(exist_ok=True)
    options.setdefault("runtime_dir", str(folder / "run"))
    with Checkpointer.open(job=job, root=folder / "root", policy=policy or Never(), **options) as ckpt:
        yield ckpt


def save_job(folder, states, steps=(1,), job="gpt", before=lambda step: None, **options):
    """Register, resume, and save at each of ``steps``; returns the directories of the generations."""
    saved = []
    with opened(folder, job, **options) as ckpt:
        for name, obj in states.items():
            if isinstance(obj, tuple) and isinstance(obj[1], dict):
                ckpt.add(name, obj[0], **obj[1])
            else:
                ckpt.add(name, obj)
        ckpt.resume()
        for step in steps:
            while ckpt.current_step < step:
                ckpt.step()
            before(step)
            saved.append(folder / "root" / job / "generations" / ckpt.save(wait=30.0).location)
    return saved


def equal(a, b):
    """Equal bit for bit, names and order of names too."""
    a, b = dict(a), dict(b)
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(raw(a[k]), raw(b[k])) for k in a
    )


def raw(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0)

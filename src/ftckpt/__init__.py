"""ftckpt: fault-tolerant replica checkpointing for elastic PyTorch training.

Public names load on first use, so that what needs no torch does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

_LAZY = {
    "Checkpointer": "ftckpt.trainer.checkpointer",
    "ResumeReport": "ftckpt.trainer.report",
    "SaveHandle": "ftckpt.trainer.handle",
    "Outcome": "ftckpt.trainer.replicas.base",
    "digest_of": "ftckpt.trainer.digests",
    "load_model": "ftckpt.trainer.inference",
    "ElasticLoader": "ftckpt.data.elastic",
    "ElasticSampler": "ftckpt.data.sampler",
    "Every": "ftckpt.domain.policy",
    "AtSteps": "ftckpt.domain.policy",
    "AtEnd": "ftckpt.domain.policy",
    "Never": "ftckpt.domain.policy",
    "Policy": "ftckpt.domain.policy",
    "Event": "ftckpt.trainer.events",
    "Saving": "ftckpt.trainer.events",
    "Captured": "ftckpt.trainer.events",
    "Committed": "ftckpt.trainer.events",
    "Resuming": "ftckpt.trainer.events",
    "Resumed": "ftckpt.trainer.events",
    "WarmStarted": "ftckpt.trainer.events",
    "Healed": "ftckpt.trainer.events",
    "Warned": "ftckpt.trainer.events",
    "Adapter": "ftckpt.interop.adapter",
    "BlockScaled": "ftckpt.interop.adapter",
    "FtckptReader": "ftckpt.interop.dcp",
    "WarmReport": "ftckpt.trainer.warmstart",
    "ModelReport": "ftckpt.trainer.inference",
    "KeepBest": "ftckpt.domain.keep",
    "KeepEvery": "ftckpt.domain.keep",
    "KeepLast": "ftckpt.domain.keep",
    "KeepSteps": "ftckpt.domain.keep",
    "KeepYounger": "ftckpt.domain.keep",
    "FtckptError": "ftckpt.errors",
}

__all__ = sorted((*_LAZY, "__version__"))

if TYPE_CHECKING:
    from ftckpt.data.elastic import ElasticLoader as ElasticLoader
    from ftckpt.data.sampler import ElasticSampler as ElasticSampler
    from ftckpt.domain.keep import KeepBest as KeepBest
    from ftckpt.domain.keep import KeepEvery as KeepEvery
    from ftckpt.domain.keep import KeepLast as KeepLast
    from ftckpt.domain.keep import KeepSteps as KeepSteps
    from ftckpt.domain.keep import KeepYounger as KeepYounger
    from ftckpt.domain.policy import AtEnd as AtEnd
    from ftckpt.domain.policy import AtSteps as AtSteps
    from ftckpt.domain.policy import Every as Every
    from ftckpt.domain.policy import Never as Never
    from ftckpt.domain.policy import Policy as Policy
    from ftckpt.errors import FtckptError as FtckptError
    from ftckpt.interop.adapter import Adapter as Adapter
    from ftckpt.interop.adapter import BlockScaled as BlockScaled
    from ftckpt.interop.dcp import FtckptReader as FtckptReader
    from ftckpt.trainer.checkpointer import Checkpointer as Checkpointer
    from ftckpt.trainer.digests import digest_of as digest_of
    from ftckpt.trainer.events import Captured as Captured
    from ftckpt.trainer.events import Committed as Committed
    from ftckpt.trainer.events import Event as Event
    from ftckpt.trainer.events import Healed as Healed
    from ftckpt.trainer.events import Resumed as Resumed
    from ftckpt.trainer.events import Resuming as Resuming
    from ftckpt.trainer.events import Saving as Saving
    from ftckpt.trainer.events import WarmStarted as WarmStarted
    from ftckpt.trainer.events import Warned as Warned
    from ftckpt.trainer.handle import SaveHandle as SaveHandle
    from ftckpt.trainer.inference import ModelReport as ModelReport
    from ftckpt.trainer.inference import load_model as load_model
    from ftckpt.trainer.replicas.base import Outcome as Outcome
    from ftckpt.trainer.report import ResumeReport as ResumeReport
    from ftckpt.trainer.warmstart import WarmReport as WarmReport

    __version__: str


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("ftckpt")
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ftckpt' has no attribute {name!r}")

"""A stored model for use without training: no agent, no quorum, and no log where there is none."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import torch
from torch import nn

from ftckpt.errors import Mismatch
from ftckpt.flows.locate import located
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.casting import FLOATS
from ftckpt.format.leaves import decode_leaves
from ftckpt.trainer.given import Given
from ftckpt.trainer.report import OnMeta, RestoreReport, StateReport, Strictness
from ftckpt.trainer.restore import restore
from ftckpt.trainer.states import StateRegistry, unwrap_module

logger = logging.getLogger("ftckpt")

_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``load_model`` loaded.

    Args:
        job, step, location: which generation.
        generation: its index in the log; None if no log was asked.
        state: which stored model filled this one, and what did not fit.
        stored: names of all stored states.
        bytes, seconds: what loading took on this rank.
    """

    job: str
    step: int
    location: str
    generation: int | None
    state: StateReport
    stored: tuple[str, ...]
    bytes: int
    seconds: float


def load_model(
    job_or_path: str | os.PathLike[str],
    model: nn.Module,
    *,
    root: str | os.PathLike[str] | None = None,
    log: str | None = None,
    step: int | None = None,
    generation: int | str | None = None,
    state: str | Sequence[str] = "model",
    strict: Strictness = "exact",
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    meta: OnMeta = "error",
    threads: int = 2,
) -> ModelReport:
    """Load one model of a generation into ``model``, in place; every byte is verified before it is used.

    A model on the meta device is given memory on the CPU when ``device`` or ``meta="materialize"`` is given, then moved to ``device``.
    Sharded models (FSDP2, DTensor) read only their own slices.

    Args:
        job_or_path: a job's name, or the path of a generation's directory (which may have been copied anywhere) or of a job's.
        root: where the job is; left out: from environment or file.
        log: the commit log's URL; "none" asks none and takes the newest complete directory. Left out: from environment or
            file, else the log inside the root, else none.
        step: the generation of this step; the newest when left out.
        generation: exactly this one, by index in the log or directory name.
        state: name of the stored model; or several in order of preference, such as ``["ema", "model"]``.
        strict: "exact", or "lenient" (missing and unexpected keys are reported), "cast", "lenient+cast".
        dtype: convert the model's tensors of float64, float32, float16 and bfloat16 to this one of them; stored values are cast. Others
            (fp8, fp4, complex, integers) stay what they are.
        device: move the model there first, and read straight into its memory.
        meta: what to do with tensors on the meta device when no ``device`` is given: refuse, leave them, or "materialize".
        threads: threads that read and copy.

    Returns:
        What was loaded, from where, and what did not fit.

    Raises:
        ConfigError: an option is none, all at once; the model is as it was.
        NotFound: no such job, step or state; says which there are.
        Mismatch: keys, shapes or dtypes that do not fit, all at once; nothing was loaded (``dtype`` and ``device`` were applied).
        Damaged: bytes do not match their digest; do not use the model.
    """
    began = time.monotonic()
    _check(job_or_path, model, state, strict, dtype, device, meta, threads)
    with located(job_or_path, root=root, log=log, step=step, generation=generation) as found:
        source = _stored(found, state)
        loaded = _load(found, source, unwrap_module(model), strict, dtype, device, meta, threads)
        return _report(found, source, loaded, time.monotonic() - began)


def _stored(found: OpenGeneration, state: str | Sequence[str]) -> str:
    """The first of the wanted models that is stored. Raises Mismatch."""
    wanted = [state] if isinstance(state, str) else [*state]
    states = found.manifest.states
    source = next((name for name in wanted if name in states), None)
    if source is None:
        raise Mismatch(
            f"{found.location} has no state {' or '.join(map(repr, wanted))}",
            now="the model was not changed",
            todo=f"stored are: {', '.join(f'{n} ({i.kind})' for n, i in states.items()) or 'none'}",
        )
    if source != wanted[0]:
        logger.warning("load_model: %r is not stored, %r was taken instead", wanted[0], source)
    return source


def _load(
    found: OpenGeneration,
    source: str,
    model: nn.Module,
    strict: Strictness,
    dtype: torch.dtype | None,
    device: torch.device | str | int | None,
    meta: OnMeta,
    threads: int,
) -> RestoreReport:
    """Make the model what it is to be, and fill it."""
    _convert(model, dtype, device)
    states = StateRegistry()
    states.add("model", model)
    report = restore(
        states,
        found.images,
        decode_leaves(found.leaves, f"{found.location}/leaves.json"),
        found.manifest.states,
        sources={"model": source},
        strict=strict if dtype is None or "cast" in strict else ("cast" if strict == "exact" else "lenient+cast"),
        meta=meta if device is None else "materialize",
        threads=threads,
    )
    if device is not None:
        model._apply(lambda t: t if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    return report


def _report(found: OpenGeneration, source: str, loaded: RestoreReport, seconds: float) -> ModelReport:
    manifest = found.manifest
    return ModelReport(
        job=manifest.job,
        step=manifest.step,
        location=found.location,
        generation=found.entry.index if found.entry is not None else None,
        state=msgspec.structs.replace(loaded.states["model"], name=source),
        stored=tuple(manifest.states),
        bytes=loaded.bytes,
        seconds=seconds,
    )


def _check(source: object, model: object, state: object, strict: object, dtype: object, device: Any, meta: object, threads: object) -> None:
    given = Given()
    given.place("job_or_path", source)
    if not isinstance(threads, int) or threads < 1:
        given.wrong.append(f"threads={threads!r} is no number of threads")
    if not isinstance(model, nn.Module):
        given.wrong.append(f"model is a {type(model).__qualname__}, and no module")
    given.sources({"model": state})
    given.word("strict", strict, get_args(Strictness))
    given.meta(meta)
    if dtype is not None and dtype not in _FLOATS:
        given.wrong.append(f"dtype={dtype!r} is none of {', '.join(map(str, _FLOATS))}")
    try:
        if device is not None and torch.empty(0, device=device).is_meta:
            given.wrong.append(f"device={device!r} has no memory")
    except Exception as e:  # noqa: BLE001  (torch raises what it likes for a device that is not here)
        given.wrong.append(f"device={device!r} cannot be used: {str(e).partition(chr(10))[0]}")
    given.refuse(now="the model was not changed")


def _convert(model: nn.Module, dtype: torch.dtype | None, device: torch.device | str | int | None) -> None:
    """Dtype and device as asked for; tensors on the meta device take the dtype only."""
    if dtype is not None:
        model._apply(lambda t: t.to(dtype) if t.dtype in _FLOATS else t)  # type: ignore[no-untyped-call]
    if device is not None and not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        model.to(device=device)

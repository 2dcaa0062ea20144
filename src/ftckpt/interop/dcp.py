"""Our generations for ``torch.distributed.checkpoint``: a reader for its ``load``, and directories that its own reader takes.

Keys are those that DCP gives to ``{"model": …, "optimizer": get_optimizer_state_dict(…)}``: ``model.layers.0.weight``,
``optimizer.state.layers.0.weight.exp_avg``. Reading DCP directories is ``interop.dcp_files``.
"""

from __future__ import annotations

import functools
import io
import os
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch._utils import _element_size as element_size  # what DCP asks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ftckpt.errors import ConfigError, FtckptError, Mismatch, Unstorable
from ftckpt.flows.export import ExportReport, leave_out, new_directory, written_files
from ftckpt.flows.locate import located
from ftckpt.flows.read import OpenGeneration
from ftckpt.format.table import Chunk
from ftckpt.interop.view import View, filled, flattened
from ftckpt.interop.weights import unwritable
from ftckpt.trainer.reading import Sink, read_all
from ftckpt.trainer.stored import Stored


class FtckptReader(StorageReader):
    """Lets ``torch.distributed.checkpoint.load(state_dict, storage_reader=…)`` read a generation, on any number of ranks.

    Each rank reads only what its plan asks for, verified block by block, straight into the tensors of ``state_dict``.
    Use it with ``with``, or close it. All ranks must have opened the same generation: with several ranks name the step.

    Args:
        root: where the job is; None if ``job`` is a path, or root is to come from environment or file.
        job: the job's name, or the path of a generation's directory.
        step: the generation of this step; the newest when left out.
        log: the commit log's URL; as for ``load_model``.
        generation: exactly this one, by index in the log or directory name.
        threads: threads that read and copy.

    Raises:
        NotFound: there is none of that kind. Damaged: a part of it does not match.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        job: str | os.PathLike[str],
        step: int | None = None,
        *,
        log: str | None = None,
        generation: int | str | None = None,
        threads: int = 2,
    ) -> None:
        self._open = ExitStack()
        self._generation = self._open.enter_context(located(job, root=root, log=log, step=step, generation=generation))
        self._view = View(self._generation)
        self._threads = threads
        self._values = dict(_keys(self._view))

    @property
    def location(self) -> str:
        """Directory name of the generation."""
        return self._generation.location

    @property
    def step(self) -> int:
        """Its step."""
        return self._generation.manifest.step

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ what DCP calls, in this order
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Raises ConfigError if another checkpoint is named than the one that was opened."""
        if checkpoint_id is not None and Path(checkpoint_id).name != self.location:
            raise ConfigError(f"this reader has {self.location} open, not {checkpoint_id}", todo="leave out checkpoint_id")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Every key with dtype, shape and boxes."""
        return Metadata(state_dict_metadata={key: _describe(value) for key, value in self._values.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, marked with the generation that this rank reads."""
        plan.storage_data = self.location
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises Mismatch if ranks opened different generations."""
        opened = sorted({str(plan.storage_data) for plan in plans})
        if len(opened) > 1:
            raise Mismatch(f"ranks read different generations: {', '.join(opened)}", now="nothing was loaded", todo="name the step")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for.

        Raises:
            Mismatch: a tensor cannot take what is asked for; nothing was loaded. Damaged: a block does not match its digest.
        """
        sinks: list[Sink] = []
        others: list[tuple[ReadItem, Any]] = []
        commits: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO or not isinstance(value, Stored):
                others.append((item, value))
                continue
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise Mismatch(f"{item.storage_index.fqn}: {tuple(item.lengths)} elements were asked for into {tuple(target.shape)}")
            if why := unwritable(target):
                raise Mismatch(f"{item.storage_index.fqn} {why}", now="nothing was loaded", todo="give tensors with memory of their own")
            sinks.append(Sink(_part(value, item), target, target.dtype != value.dtype or target.is_conj() or target.is_neg()))
            commits.append((item, target))
        with torch.no_grad():
            read_all(self._view.index, sinks, self._threads)
        for item, target in commits:
            planner.commit_tensor(item, target)
        for item, value in others:
            planner.load_bytes(item, _as_bytes(filled(value, self._view.whole)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: which reader to use is said, not guessed."""
        return False


def _keys(view: View) -> Iterable[tuple[str, Any]]:
    """Keys as DCP gives them, and the options of optimizers by parameter too (``flatten_optimizer_state_dict=True``)."""
    states = view.states()
    yield from flattened(states)
    for name, state in states.items():
        if isinstance(state, dict) and state.keys() == {"state", "param_groups"}:
            for group in state["param_groups"]:
                for fqn in group["params"]:
                    options = {key: value for key, value in group.items() if key != "params"}
                    yield from flattened({name: {"param_groups": {fqn: options}}})


def _describe(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, Stored):
        return BytesStorageMetadata()
    boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for _, c in value.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size(value.shape), boxes)


def _part(stored: Stored, item: ReadItem) -> Stored:
    """The elements that an item asks for, as a tensor of their own: its only box is the stored one, moved."""
    wanted = tuple(item.storage_index.offset) if item.storage_index.offset is not None else (0,) * len(stored.shape)
    for number, chunk in stored.chunks:
        if chunk.offsets == wanted and all(n >= o + k for n, o, k in zip(chunk.sizes, item.storage_offsets, item.lengths, strict=True)):
            moved = Chunk(tuple(-o for o in item.storage_offsets), chunk.sizes, chunk.begin, chunk.end)
            return Stored(stored.name, stored.dtype, tuple(item.lengths), ((number, moved),))
    raise Mismatch(f"{stored.name} has no box at {wanted}", now="nothing was loaded")


def _as_bytes(value: Any) -> io.BytesIO:
    """A plain value in the form that DCP's planner takes apart again."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


# ---------------------------------------------------------------- writing
class _Planner(DefaultSavePlanner):
    def __init__(self, progress: Callable[[str, int], None]) -> None:
        super().__init__()
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of one item, told to the progress."""
        data = super().resolve_data(write_item)
        size = data.nbytes if isinstance(data, torch.Tensor) else len(data.getbuffer())
        self._progress(write_item.index.fqn, size)
        return data


def _silent(key: str, size: int) -> None:
    """Progress that nobody looks at."""


def export_dcp(
    generation: OpenGeneration,
    out: str | os.PathLike[str],
    *,
    states: Iterable[str] | None = None,
    unsupported: str = "error",
    progress: Callable[[str, int], None] | None = None,
) -> ExportReport:
    """Write a generation as a DCP directory, readable by plain ``torch.distributed.checkpoint.load``.

    DCP's metadata and its values that are not tensors are pickles, made by torch; ftckpt itself reads such a directory only
    when told to (``format="dcp"``), with a reader that runs nothing.

    Args:
        generation: open.
        out: directory to make; it must not exist, or be empty.
        states: which states; all when left out.
        unsupported: "error" refuses tensors of a dtype that torch's files do not have (int4, bits8, ...), "drop" leaves them out.
        progress: called with a key and its bytes.

    Raises:
        ConfigError: ``out`` has something in it, or a state is not stored. Unstorable: tensors that DCP cannot write.
        Damaged: a block does not match its digest.
    """
    began = time.monotonic()
    view = View(generation)
    known = generation.manifest.states
    names = [*known] if states is None else [*states]
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"{generation.location} has no state {', '.join(map(repr, missing))}", todo=f"it has {', '.join(known)}")
    stored = {name: view.state(name) for name in names}
    dropped = leave_out(
        {
            key: f"{value.dtype} is no dtype of its files"
            for key, value in flattened(stored)
            if isinstance(value, Stored) and not _saves(value.dtype)
        },
        unsupported,
    )
    nested = filled(_kept(stored), view.whole)
    with new_directory(out) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it assumes a single process, which is meant
        try:
            save(nested, storage_writer=FileSystemWriter(folder, sync_files=True), planner=_Planner(progress or _silent), no_dist=True)
        except CheckpointException as e:
            error = next(error for error, _ in e.failures.values())
            if isinstance(error, FtckptError | OSError) or not isinstance(error, Exception):
                raise error from e
            raise Unstorable(
                f"torch.distributed.checkpoint cannot write {generation.location}: {type(error).__name__}: {error}",
                now="nothing was left behind",
            ) from e
        files = written_files(folder)
    tensors = sum(isinstance(value, torch.Tensor) for _, value in flattened(nested))
    report = ExportReport.of(generation, out, files, format="dcp", tensors=tensors, began=began, states=names)
    return msgspec.structs.replace(report, left_out=dropped)


@functools.cache
def _saves(dtype: torch.dtype) -> bool:
    """Whether torch's files can have tensors of a dtype, and DCP knows their size."""
    try:
        torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
        element_size(dtype)  # type: ignore[no-untyped-call]
    except (KeyError, TypeError):
        return False
    return True


def _kept(value: Any) -> Any:
    """A nested value without placeholders of tensors that torch's files cannot have (None in lists)."""
    if isinstance(value, dict):
        return {key: _kept(inner) for key, inner in value.items() if not _refused(inner)}
    if type(value) in (list, tuple):
        return type(value)(None if _refused(inner) else _kept(inner) for inner in value)
    return value


def _refused(value: Any) -> bool:
    return isinstance(value, Stored) and not _saves(value.dtype)

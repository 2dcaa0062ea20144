"""A first start from given weights: our generations, safetensors, ``.pt`` files, DCP directories. Does not decide whether."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from ftckpt.errors import ConfigError, NotFound
from ftckpt.flows.locate import is_path, located
from ftckpt.format.leaves import decode_leaves
from ftckpt.format.manifest import MANIFEST
from ftckpt.format.namemap import NameMap
from ftckpt.interop.adapter import Adapter
from ftckpt.interop.dcp_files import METADATA, DcpWeights
from ftckpt.interop.huggingface import SUFFIX, SafetensorsWeights
from ftckpt.interop.torchfile import TorchFileWeights
from ftckpt.interop.view import GenerationWeights
from ftckpt.interop.weights import Weights, fill, named
from ftckpt.trainer.given import Given
from ftckpt.trainer.report import StateReport, Strictness
from ftckpt.trainer.restore import restore
from ftckpt.trainer.states import StateRegistry

Format = Literal["auto", "ftckpt", "safetensors", "torch", "dcp"]
_TORCH = (".pt", ".pth", ".bin", ".ckpt")


class WarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a warm start did.

    Args:
        source: the path or job that was given.
        loaded: whether anything was loaded; if not, ``reason`` names what the job resumes from instead.
        format: what the source is.
        states: what happened to each live state.
        step: of the generation, if the source is one of ours; the job's own steps begin at 0 all the same.
        bytes, seconds: what loading took on this rank (bytes for our own generations only).
    """

    source: str
    loaded: bool
    reason: str = ""
    format: str = ""
    states: dict[str, StateReport] = msgspec.field(default_factory=dict)
    step: int | None = None
    bytes: int = 0
    seconds: float = 0.0


class WarmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``Checkpointer.warm_start``.

    Args:
        what: "weights", or "all" that a generation of ftckpt has under the registered names.
        format: what the source is; "auto" looks, but never reads a DCP directory, which must be named: "dcp".
        state: which registered model; left out: all of a generation's; of other sources "model", or the only one.
        key: where in a ``.pt`` file or DCP directory the weights are: ``"model"``, ``"state.model"``.
        name_map: our name -> name in the source; see ``format.namemap``.
        hooks: an ``Adapter``, which can change values too.
        sources: of a generation: live name -> stored name, or several in order of preference.
        strict, on_mismatch: as for ``resume``.
        root, log, step: of a generation, as for ``load_model``.
    """

    what: Literal["weights", "all"] = "weights"
    format: Format = "auto"
    state: str | None = None
    key: str | Sequence[str] = ()
    name_map: NameMap | None = None
    hooks: Adapter | None = None
    sources: Mapping[str, str | Sequence[str]] | None = None
    strict: Strictness | Mapping[str, Strictness] = "exact"
    on_mismatch: Any = "error"
    root: str | os.PathLike[str] | None = None
    log: str | None = None
    step: int | None = None


def load_into(registry: StateRegistry, source: str | os.PathLike[str], options: WarmOptions) -> WarmReport:
    """Load the source into the registered objects.

    Raises:
        ConfigError: options that do not go together, or a format that must be named. NotFound: nothing is there.
        Mismatch: what does not fit, all at once. Damaged: bytes that do not match or cannot be read safely.
    """
    began = time.monotonic()
    _check(source, options, [state.name for state in registry])
    kind = options.format if options.format != "auto" else recognise(source)
    adapted = options.name_map is not None or options.hooks is not None
    _check_for(options, f"{source} is read as {kind}{', under other names' if adapted else ''}", kind, adapted)
    if kind == "ftckpt" and not adapted:
        report = _generation(registry, source, options)
    elif options.what == "all":
        raise ConfigError(
            f"what='all' is for generations of ftckpt under their own names, and {source} is read as {kind}", todo="what='weights'"
        )
    else:
        report = _weights(registry, source, kind, options)
    return msgspec.structs.replace(report, seconds=time.monotonic() - began)


def _check(source: object, options: WarmOptions, states: Sequence[str]) -> None:
    """Raises ConfigError: what no source could be loaded with."""
    given = Given()
    given.place("source", source)
    given.word("what", options.what, ("weights", "all"))
    given.word("format", options.format, get_args(Format))
    given.strict(options.strict, states)
    given.sources(options.sources, states)
    given.on_mismatch(options.on_mismatch, states)
    if options.state is not None and options.what == "all":
        given.wrong.append("state= names one model, and what='all' is for everything")
    if not isinstance(options.key, str):
        given.names("key", options.key)
    if options.name_map is not None and not (isinstance(options.name_map, Mapping) or callable(options.name_map)):
        given.wrong.append(f"name_map={options.name_map!r} is neither a mapping nor a function")
    if options.hooks is not None and not isinstance(options.hooks, Adapter):
        given.wrong.append(f"hooks={options.hooks!r} is no Adapter")
    if options.hooks is not None and options.name_map is not None:
        given.wrong.append("name_map and hooks exclude one another: give the map to the hooks, Adapter(name_map)")
    given.refuse(now="nothing was loaded")


def _check_for(options: WarmOptions, source: str, kind: str, adapted: bool) -> None:
    """Raises ConfigError: what would be passed over with this kind of source."""
    only = {"sources": options.sources is not None, "on_mismatch": options.on_mismatch != "error"} if kind != "ftckpt" or adapted else {}
    only |= {"step": options.step is not None} if kind != "ftckpt" else {"key": bool(options.key)}
    wrong = [f"{name}=" for name, was_given in only.items() if was_given]
    if wrong:
        raise ConfigError(f"{source}, where {', '.join(wrong)} has no meaning", now="nothing was loaded", todo="leave it out")


def recognise(source: str | os.PathLike[str]) -> Format:
    """What a source is, by the names of its files.

    Raises:
        NotFound: it is nothing known. ConfigError: it is a DCP directory, which must be named as such.
    """
    text = os.fspath(source)
    path = Path(text.removeprefix("file://")).expanduser()
    if not is_path(source) and not (path.suffix in (SUFFIX, *_TORCH) and path.is_file()):  # a file's bare name is no job's
        return "ftckpt"
    if path.is_file():
        if path.suffix == SUFFIX:
            return "safetensors"
        if path.suffix in _TORCH:
            return "torch"
    elif path.is_dir():
        if (path / MANIFEST).is_file() or (path / "generations").is_dir():
            return "ftckpt"
        if any(p.suffix == SUFFIX for p in path.iterdir()):
            return "safetensors"
        if (path / METADATA).is_file():
            raise ConfigError(
                f"{path} is a directory of torch.distributed.checkpoint, whose metadata is a pickle",
                now="it was not read",
                todo='say so: format="dcp"; its metadata is then read by a reader that runs nothing',
            )
    raise NotFound(
        f"{source} is no generation, no {SUFFIX} file or directory of them, no {', '.join(_TORCH)} file",
        now="nothing was loaded",
        todo="check the path, or say what it is with format=",
    )


def _generation(registry: StateRegistry, source: str | os.PathLike[str], options: WarmOptions) -> WarmReport:
    only = None
    if options.what == "weights":
        only = [s.name for s in registry.of_scope("shared") if s.kind == "module"] if options.state is None else [options.state]
    with located(source, root=options.root, log=options.log, step=options.step) as found:
        report = restore(
            registry,
            found.images,
            decode_leaves(found.leaves, f"{found.location}/leaves.json"),
            found.manifest.states,
            only=only,
            sources=options.sources,
            strict=options.strict,
            on_mismatch=options.on_mismatch,
        )
        return WarmReport(
            source=os.fspath(source), loaded=True, format="ftckpt", states=report.states, step=found.manifest.step, bytes=report.bytes
        )


def _weights(registry: StateRegistry, source: str | os.PathLike[str], kind: str, options: WarmOptions) -> WarmReport:
    models = [s.name for s in registry.of_scope("shared") if s.kind == "module"]
    name = options.state or ("model" if "model" in models or len(models) != 1 else models[0])
    if name not in models:
        raise ConfigError(
            f"there is no model {name!r} to load into", todo=f"name one with state=: {', '.join(models) or 'none is registered'}"
        )
    strict = options.strict if isinstance(options.strict, str) else options.strict.get(name, "exact")
    parts = registry[name].parts
    if len(parts) != 1:
        raise ConfigError(
            f"{name!r} has {len(parts)} parts; others' files are loaded into one module", todo="use load_model or interop directly"
        )
    adapter = options.hooks or Adapter(options.name_map)
    with ExitStack() as stack:
        if kind == "ftckpt":
            found = stack.enter_context(located(source, root=options.root, log=options.log, step=options.step))
            weights: Weights = GenerationWeights(found, name)
        else:
            weights = open_weights(source, kind, options.key)
        report = fill(parts[0], stack.enter_context(weights), adapter, strict=strict)
    return WarmReport(source=os.fspath(source), loaded=True, format=kind, states={name: named(report, name)})


def open_weights(source: str | os.PathLike[str], kind: str, key: str | Sequence[str] = ()) -> Weights:
    """Others' files as weights, to be entered with ``with``.

    Raises:
        ConfigError: there is no such format, or a key where it has no meaning.
    """
    text = os.fspath(source).removeprefix("file://")
    if kind == "torch":
        return TorchFileWeights(text, key)
    if kind == "dcp":
        return DcpWeights(text, key)
    if kind != "safetensors":
        raise ConfigError(f"there is no format {kind!r} for others' files", todo="choose safetensors, torch or dcp")
    if key:
        raise ConfigError("safetensors files have no keys to follow", todo="leave out key, or map the names")
    return SafetensorsWeights(text)

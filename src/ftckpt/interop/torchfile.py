"""Weights in a file of ``torch.save``, read with ``weights_only=True``, under a key path; nothing in the file is run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ftckpt.errors import ConfigError, Damaged, Mismatch, NotFound, Unstorable
from ftckpt.interop.weights import Kind
from ftckpt.trainer.layout import check_storable


class TorchFileWeights:
    """Tensors of a ``.pt`` file.

    Args:
        path: the file.
        key: where in it the weights are: ``"model"``, ``"state.model"`` or ``("state", "model")``; empty: at its top.
    """

    def __init__(self, path: str | os.PathLike[str], key: str | Sequence[str] = ()) -> None:
        self.where = os.fspath(path)
        self._key = tuple(key.split(".")) if isinstance(key, str) and key else tuple(key)
        self._tensors: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Self:
        """Read the file's structure; tensors stay in the file where it can be mapped.

        Raises:
            NotFound: no such file. Damaged: it cannot be read without running what it contains.
            ConfigError: nothing is under the key. Mismatch: a tensor there is none that has its values in plain order (sparse, meta, ...).
        """
        if not Path(self.where).is_file():
            raise NotFound(f"{self.where} does not exist", todo="check the path")
        found = _load(self.where)
        for depth, step in enumerate(self._key):
            if not isinstance(found, Mapping) or step not in found:
                raise ConfigError(
                    f"{self.where} has nothing under {'.'.join(self._key[: depth + 1])}",
                    now="nothing was loaded",
                    todo=f"its keys there are: {_keys(found)}",
                )
            found = found[step]
        if not isinstance(found, Mapping) or not any(isinstance(v, torch.Tensor) for v in found.values()):
            raise ConfigError(
                f"{self.where} has no tensors at {'.'.join(self._key) or 'its top'}", now="nothing was loaded", todo=f"its keys there are: {_keys(found)}; name the right one with key="
            )  # fmt: skip
        tensors = {str(k): v.detach() for k, v in found.items() if isinstance(v, torch.Tensor)}
        for name, tensor in tensors.items():
            try:
                check_storable(tensor, f"{self.where}: {name}")
            except Unstorable as e:
                raise Mismatch(e.what, now="nothing was loaded", todo="write the file anew with plain tensors, or without it") from e
        self._tensors = tensors
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tensors.clear()

    def kinds(self) -> Mapping[str, Kind]:
        """All names with what they are."""
        return {name: Kind(t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._tensors[name]


def _load(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            mapped = file.read(4) == b"PK\x03\x04"  # older files are no archives and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as e:  # torch raises what it likes for a file that it does not trust
        raise Damaged(
            f"{path} cannot be read as plain weights: {type(e).__name__}: {_reason(e)}",
            now="nothing in it was run and nothing was loaded",
            todo="convert it where it was made: torch.save(model.state_dict(), …), or safetensors",
        ) from e


def _reason(error: Exception) -> str:
    """What torch found, without its advice to run the file."""
    said = [line.strip() for line in str(error).rpartition("WeightsUnpickler error:")[2].splitlines()]
    return next((line for line in said if line), "")[:500]


def _keys(found: Any) -> str:
    return ", ".join(map(str, list(found)[:20])) if isinstance(found, Mapping) else f"none (it is a {type(found).__name__})"

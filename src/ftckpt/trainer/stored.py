"""What a set of images holds, by name: dtype, shape and boxes; reads no bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ftckpt.errors import Damaged
from ftckpt.format.image import Image
from ftckpt.format.table import Chunk
from ftckpt.trainer.layout import dtype_name


class Stored(NamedTuple):
    """One stored tensor: its boxes, each with the number of the image that has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[int, Chunk], ...]


class Index:
    """What a set of images holds, by name.

    Args:
        images: the shards of one generation or snapshot, in any order.

    Raises:
        Damaged: two shards disagree on a tensor's dtype or shape.
    """

    def __init__(self, images: Sequence[Image]) -> None:
        self.images = tuple(images)
        self._tensors: dict[str, Stored] = {}
        self._aliases: dict[str, str] = {}
        dtypes: dict[str, torch.dtype] = {}
        for number, image in enumerate(images):
            self._aliases.update(image.table.aliases)
            for entry in image.table.tensors:
                chunks = tuple([(number, chunk) for chunk in entry.chunks])
                known = self._tensors.get(entry.name)
                if known is None:
                    dtype = dtypes.get(entry.dtype)
                    if dtype is None:
                        dtype = dtypes[entry.dtype] = torch_dtype(entry.dtype, entry.name)
                    self._tensors[entry.name] = Stored(entry.name, dtype, entry.shape, chunks)
                    continue
                if (dtype_name(known.dtype), known.shape) != (entry.dtype, entry.shape):
                    raise Damaged(
                        f"{image.where}: {entry.name} is {entry.dtype} {entry.shape}; another shard has {known.dtype} {known.shape}",
                        todo="take another generation",
                    )
                have = {(chunk.offsets, chunk.sizes) for _, chunk in known.chunks}
                more = tuple(c for c in chunks if (c[1].offsets, c[1].sizes) not in have)
                self._tensors[entry.name] = known._replace(chunks=known.chunks + more)

    def get(self, name: str) -> Stored | None:
        """A stored tensor by its name or an alias."""
        return self._tensors.get(self._aliases.get(name, name) if self._aliases else name)

    def below(self, prefix: str) -> Iterator[str]:
        """Names and aliases that begin with ``prefix``, without it."""
        for names in (self._tensors, self._aliases):
            for name in names:
                if name.startswith(prefix):
                    yield name[len(prefix) :]


def torch_dtype(name: str, where: str) -> torch.dtype:
    """The dtype of a name in a table.

    Raises:
        Damaged: this torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise Damaged(f"{where} has dtype {name}, which this torch ({torch.__version__}) does not have", todo="use a newer torch")
    return dtype

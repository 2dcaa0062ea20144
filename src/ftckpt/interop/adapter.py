"""How a model's tensors are called, cut and scaled in other people's files, both ways; must not read or write files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ftckpt.errors import Mismatch
from ftckpt.format.namemap import NameMap, lookup


class Adapter:
    """Names and values of the live model and of the files. Subclass it for what a name map cannot say.

    Reading asks for each live tensor which ones of the file make it (``parts``) and puts them together (``join``); writing
    takes each live tensor apart (``split``). A tensor of the file may be part of several live ones.

    Args:
        names: our name -> theirs; see ``format.namemap``. Left out: names are the same.
    """

    def __init__(self, names: NameMap | None = None) -> None:
        self._look = lookup(names)

    def parts(self, name: str, there: Mapping[str, object]) -> Sequence[str]:
        """Names in the file of what makes the live tensor ``name``; none if the file has nothing for it.

        Args:
            there: what the file has, by name.
        """
        theirs = self._look(name)
        return () if theirs is None else (theirs,)

    def join(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The live tensor's value from its parts, in the order of ``parts``; they must not be changed."""
        return parts[0]

    def split(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """What is written for the live tensor ``name``, by name in the file; nothing leaves it out.

        It is also asked with a tensor on the meta device, to learn names, dtypes and shapes.
        """
        theirs = self._look(name)
        return {} if theirs is None else {theirs: tensor}


class BlockScaled(Adapter):
    """Weights stored as fp8 (or another small dtype) with one scale per block, beside plain ones: they are multiplied out.

    Args:
        names: as for ``Adapter``.
        block: rows and columns that share a scale.
        suffix: what a scale's name has after the weight's.
        dtype: of the result.
    """

    def __init__(
        self,
        names: NameMap | None = None,
        *,
        block: tuple[int, int] = (128, 128),
        suffix: str = "_scale_inv",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(names)
        self._block, self._suffix, self._dtype = block, suffix, dtype

    def parts(self, name: str, there: Mapping[str, object]) -> Sequence[str]:
        """The weight, and its scales where there are any."""
        own = super().parts(name, there)
        return [found for one in own for found in (one, one + self._suffix) if found == one or found in there]

    def join(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Values times scales.

        Raises:
            Mismatch: the scales are not one per block.
        """
        if len(parts) == 1:
            return parts[0]
        weight, scale = parts
        grid = tuple(-(-n // b) for n, b in zip(weight.shape, self._block, strict=False))
        if weight.ndim != 2 or tuple(scale.shape) != grid:
            raise Mismatch(f"{name}: scales {tuple(scale.shape)} for a weight {tuple(weight.shape)} in blocks of {self._block}")
        rows, columns = weight.shape
        wide = scale.float().repeat_interleave(self._block[0], 0)[:rows].repeat_interleave(self._block[1], 1)[:, :columns]
        return (weight.float() * wide).to(self._dtype)

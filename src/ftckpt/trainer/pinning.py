"""Registers the arena's memory with CUDA, so that copies from a device go straight into it; copies nothing itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

logger = logging.getLogger("ftckpt")


class Pinned:
    """Memory that CUDA may write to directly, until ``close``. What cannot be registered stays as it is: copies to it are slower.

    Args:
        memory: page-aligned parts; they must stay mapped until ``close``.
        cudart: the CUDA runtime as ``torch.cuda.cudart()`` gives it.
    """

    def __init__(self, memory: Iterable[memoryview], cudart: Any = None) -> None:
        self._cudart = torch.cuda.cudart() if cudart is None else cudart  # type: ignore[no-untyped-call]
        self._addresses: list[int] = []
        for part in memory:
            address = np.frombuffer(part, np.uint8).__array_interface__["data"][0]
            code = int(self._cudart.cudaHostRegister(address, part.nbytes, 0))
            if code != 0:
                logger.warning("CUDA does not register a buffer of %d bytes (error %d): saves will wait longer", part.nbytes, code)
                break
            self._addresses.append(address)

    def close(self) -> None:
        """Give the memory back to be unmapped. May be called twice."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            self._cudart.cudaHostUnregister(address)

"""The torchrun rendezvous ``etcd-v3``: ``torchrun --rdzv-backend=etcd-v3 --rdzv-endpoint=HOST:PORT --rdzv-id=ID``.

torchrun imports every handler that is installed, whichever is asked for; so this module imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

__all__ = ["create_handler"]


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What the entry point group ``torchrun.handlers`` asks for: a function that makes a handler from torchrun's parameters."""

    def create(params: RendezvousParameters) -> RendezvousHandler:
        from ftckpt.elastic.handler import create_etcd_v3_handler

        return create_etcd_v3_handler(params)

    return create

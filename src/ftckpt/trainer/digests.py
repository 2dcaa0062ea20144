"""A digest of a model's live values, for history files and checks: equal digests are equal bits. Changes nothing."""

from __future__ import annotations

import torch
import xxhash


def digest_of(module: torch.nn.Module) -> str:
    """xxh3-128 (hex) over names and bytes of all parameters and buffers, in order; of local values where sharded."""
    h = xxhash.xxh3_128()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if not isinstance(tensor, torch.Tensor):
                continue
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            h.update(name.encode())
            h.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()

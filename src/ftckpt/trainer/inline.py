"""Small nested values with their tensors inside, as one typed tree: for cursors and for what travels beside an image."""

from __future__ import annotations

import base64
from typing import Any

import torch

from ftckpt.errors import Damaged
from ftckpt.format.leaves import decode_tree, encode_tree
from ftckpt.trainer.layout import check_storable, dtype_name
from ftckpt.trainer.naming import decode_torch, encode_torch


def encode_value(value: object, where: str = "") -> object:
    """Encode a value; its tensors become base64 text (meant for small ones).

    Raises:
        Unstorable: names the key path.
    """
    return encode_tree(value, hook=_encode, where=where)


def decode_value(doc: object) -> Any:
    """Inverse of :func:`encode_value`; tensors are made anew on the CPU.

    Raises:
        Damaged: not such a document.
    """
    return decode_tree(doc, tensor=_decode)


def _encode(path: tuple[object, ...], value: object) -> object | None:
    if not isinstance(value, torch.Tensor):
        return encode_torch(value)
    key = "/".join(str(p) for p in path)
    check_storable(value, key)
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = base64.b64encode(flat.numpy().tobytes()).decode()
    return {"$tensor": {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}}


def _decode(node: dict[str, object]) -> object:
    inner = node.get("$tensor")
    if not isinstance(inner, dict):
        found = decode_torch(node)
        if found is None:
            raise Damaged(f"there is no such tag in this document: {', '.join(node)}")
        return found
    try:
        dtype = getattr(torch, str(inner["dtype"]))
        data = bytearray(base64.b64decode(str(inner["data"]), validate=True))
        shape = [int(n) for n in inner["shape"]]
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
    except (KeyError, ValueError, AttributeError, RuntimeError, TypeError) as e:
        raise Damaged(f"an inline tensor cannot be read: {e}") from e

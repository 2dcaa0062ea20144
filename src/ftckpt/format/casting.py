"""Floating-point bytes into another floating-point dtype, as torch rounds them (half to even). NumPy only, never torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ftckpt.errors import ConfigError

FLOATS = ("float64", "float32", "float16", "bfloat16")

_Array = np.ndarray[Any, np.dtype[Any]]


def check_target(dtype: str) -> str:
    """A dtype that values can be cast to, by torch's name; short forms are understood.

    Raises:
        ConfigError: it is none.
    """
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32", "fp64": "float64"}.get(
        dtype, dtype
    )
    name = name.removeprefix("torch.")
    if name not in FLOATS:
        raise ConfigError(f"cannot cast to {dtype}", now="nothing was written", todo=f"choose one of {', '.join(FLOATS)}")
    return name


def cast(data: memoryview, source: str, target: str) -> tuple[memoryview, int]:
    """Convert values.

    Args:
        data: values of dtype ``source``, one after another.
        source, target: two of ``FLOATS``.

    Returns:
        The values as bytes of dtype ``target``, and how many finite ones became infinite.
    """
    values = _decode(data, source)
    with np.errstate(over="ignore", invalid="ignore"):
        out = _encode(values, target)
    return out.data.cast("B"), _overflowed(values, out, target)


def _decode(data: memoryview, source: str) -> _Array:
    if source == "bfloat16":
        bits = np.frombuffer(data, np.uint16).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, np.dtype(source))


def _encode(values: _Array, target: str) -> _Array:
    if target != "bfloat16":
        return (values.astype(np.float32) if target == "float16" else values).astype(np.dtype(target))
    single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def _overflowed(values: _Array, out: _Array, target: str) -> int:
    infinite = (out & np.uint16(0x7FFF)) == 0x7F80 if target == "bfloat16" else np.isinf(out)
    count = int(np.count_nonzero(infinite))
    return count and int(np.count_nonzero(infinite & np.isfinite(values)))

"""Random number streams of this process as plain values, and streams derived for a joiner; never pickled."""

from __future__ import annotations

import hashlib
import random
from array import array
from typing import Any

import numpy as np
import torch

from ftckpt.errors import ConfigError, Damaged

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators that ``generator_state`` takes."""

_BAD = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError)


def host_rng() -> dict[str, object]:
    """The streams of python, NumPy and torch on the CPU, as ``capture_rng``."""
    return {
        "python": _python_state(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": _bytes(torch.get_rng_state()),
    }


def capture_rng() -> dict[str, object]:
    """The streams of python, NumPy, torch on the CPU and on each accelerator in use, as values that ``format.leaves`` encodes."""
    value = host_rng()
    module = _accelerator()
    if module is not None:
        value["devices"] = {"type": module[0], "states": [_bytes(s) for s in module[1].get_rng_state_all()]}
    return value


def restore_rng(value: object) -> list[str]:
    """Set the streams. Call it last.

    Returns:
        What could not be set (a stored accelerator that this process lacks), one sentence each.

    Raises:
        Damaged: not such a value; the streams are as before.
    """
    before = capture_rng()
    try:
        return _set_all(value)
    except _BAD as e:
        _set_all(before)
        raise Damaged(f"the random number streams cannot be set: {e}", now="they are as before", todo="take another generation") from e


def derive_rng(seed: int, replica: str, rank: int, step: int) -> None:
    """Seed every stream from (job seed, replica, rank, step): for a rank that has no cursor of its own."""

    def seed_for(stream: str) -> int:
        text = f"ftckpt rng\0{seed}\0{replica}\0{rank}\0{step}\0{stream}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    random.seed(seed_for("python"))
    np.random.seed(seed_for("numpy") & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed_for("torch"))
    module = _accelerator()
    if module is not None:
        module[1].manual_seed_all(seed_for("devices"))


def generator_state(generator: object) -> dict[str, object]:
    """The state of one generator object of torch, NumPy or Python, as a value that ``format.leaves`` encodes.

    Raises:
        ConfigError: another kind of object.
    """
    if isinstance(generator, torch.Generator):
        return {"torch": _bytes(generator.get_state())}
    if isinstance(generator, np.random.Generator):
        return {"numpy": generator.bit_generator.state}
    if isinstance(generator, np.random.RandomState):
        return {"numpy_legacy": generator.get_state(legacy=False)}
    if isinstance(generator, random.Random):
        return {"python": _python_state(generator.getstate())}
    raise ConfigError(f"{type(generator).__qualname__} is no random number generator of torch, NumPy or Python")


def set_generator_state(generator: Any, value: Any) -> None:
    """Give a generator object a state from ``generator_state``.

    Raises:
        Damaged: the value is not of this kind of generator; it is as before.
    """
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(_tensor(value["torch"]))
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = value["numpy"]
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(value["numpy_legacy"])
        else:
            generator.setstate(_python_tuple(value["python"]))
    except _BAD as e:
        raise Damaged(f"a generator of kind {type(generator).__qualname__} cannot take the stored state: {e}", now="it is as before") from e


def _set_all(value: Any) -> list[str]:
    notes = []
    python, torch_state = _python_tuple(value["python"]), _tensor(value["torch"])
    devices = value.get("devices")
    np.random.set_state(value["numpy"])
    random.setstate(python)
    torch.set_rng_state(torch_state)
    if devices is not None:
        module = _accelerator()
        count = 0 if module is None or module[0] != devices["type"] else module[1].device_count()
        if count < len(devices["states"]):
            notes.append(f"random streams of {len(devices['states']) - count} {devices['type']} devices were stored that are not here")
        for index, state in enumerate(devices["states"][:count]):
            if module is not None:
                module[1].set_rng_state(_tensor(state), index)
    return notes


def _accelerator() -> tuple[str, Any] | None:
    """The accelerator's type and module if this process uses one already (asking must not start one)."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    started = getattr(module, "is_initialized", None)
    return (kind.type, module) if hasattr(module, "get_rng_state_all") and (started is None or started()) else None


def _python_state(state: tuple[Any, ...]) -> dict[str, object]:
    version, words, gauss = state
    return {"version": version, "words": array("I", words).tobytes(), "gauss": gauss}


def _python_tuple(value: Any) -> tuple[Any, ...]:
    return value["version"], tuple(array("I", value["words"])), value["gauss"]


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)

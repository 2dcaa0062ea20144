"""Registering with options: one that the object does not take is refused, and nothing is registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ftckpt import Checkpointer, Never
from ftckpt.errors import ConfigError

BATCHES = [[1], [2]]


@pytest.mark.covers("A19")
def test_options_that_the_kind_does_not_take_are_refused_by_name(tmp_path: Path) -> None:
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (BATCHES, {"kind": "loader", "scope": "replica"}, "takes no scope"),
        (BATCHES, {"kind": "loader", "only_trainable": True}, "takes no only_trainable"),
        (BATCHES, {"kind": "loader", "scope": "replica", "only_trainable": True}, "takes no scope and no only_trainable"),
        (DataLoader(BATCHES), {"only_trainable": True}, "takes no only_trainable"),  # type: ignore[arg-type]
        (torch.nn.Linear(1, 1), {"cursor": False}, "no loader, which takes no cursor"),
        (BATCHES, {"cursor": False}, "no loader, which takes no cursor"),
    ]
    with Checkpointer.open(job="j", root=tmp_path, policy=Never()) as ckpt:
        for obj, options, words in refused:
            with pytest.raises(ConfigError, match=words):
                ckpt.add("one", obj, **options)
        assert "one" not in ckpt.registry
        ckpt.add("one", BATCHES, kind="loader", cursor=False)  # and nothing was in its place


def test_a_name_is_of_one_state_or_loader(tmp_path: Path) -> None:
    with Checkpointer.open(job="j", root=tmp_path, policy=Never()) as ckpt:
        ckpt.add("one", {"a": 1})
        with pytest.raises(ConfigError, match="state 'one' is registered already"):
            ckpt.add("one", BATCHES, kind="loader")
        ckpt.add("two", BATCHES, kind="loader")
        with pytest.raises(ConfigError, match="loader 'two' is registered already"):
            ckpt.add("two", {"a": 1})
        with pytest.raises(ConfigError, match="cannot be used"):
            ckpt.add("a name", BATCHES, kind="loader")

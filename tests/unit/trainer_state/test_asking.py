"""What ``resume()`` and ``load_ahead()`` are asked for: numbers and names as users write them, and what is none of those."""

from __future__ import annotations

import numpy as np
import pytest

from ftckpt.errors import ConfigError
from ftckpt.trainer.starting import _asked_generation, _asked_step


@pytest.mark.parametrize("step", [0, 7, np.int64(7)])
def test_a_step_is_any_whole_number(step: object) -> None:
    assert _asked_step(step) == int(step)  # type: ignore[call-overload]
    assert type(_asked_step(step)) is int


@pytest.mark.covers("F78", "I14")
@pytest.mark.parametrize("step", ["1", 1.0, True, -1, b"1", [1]])
def test_a_step_that_is_none_is_a_config_error(step: object) -> None:
    with pytest.raises(ConfigError, match="is no step"):
        _asked_step(step)


@pytest.mark.parametrize(("given", "asked"), [(3, 3), ("3", 3), ("#3", 3), ("s000000005-ab-cd", "s000000005-ab-cd"), (None, None)])
def test_a_generation_is_an_index_or_a_directory(given: int | str | None, asked: int | str | None) -> None:
    assert _asked_generation(given) == asked


@pytest.mark.covers("F78", "I14")
@pytest.mark.parametrize("given", [True, -1, 2.0, "", b"s5"])
def test_a_generation_that_is_none_is_a_config_error(given: object) -> None:
    with pytest.raises(ConfigError, match="is no generation"):
        _asked_generation(given)

"""Names in paths and keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.domain.names import (
    GenerationName,
    attempt_id,
    check_name,
    cursor_file,
    generation_dir,
    generations_dir,
    member_id,
    shard_file,
)
from ftckpt.errors import ConfigError


@pytest.mark.covers("F33")
@pytest.mark.parametrize("name", ["", "none", "None", "NULL", "default", "a/b", "..", "a..b", "-a", ".a", "a b", "a\n", "ä", "a" * 101])
def test_names_that_cannot_stand_in_paths_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_name("job", name)


@pytest.mark.parametrize("name", ["gpt", "gpt-2.1_x", "0", "A" * 100])
def test_plain_names_are_taken_as_they_are(name: str) -> None:
    assert check_name("job", name) == name


@given(st.integers(0, 10**15), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_generation_name_reads_back_as_it_was_written(step: int, trajectory: int, attempt: int) -> None:
    name = GenerationName(step, f"{trajectory:08x}", f"{attempt:08x}")
    assert GenerationName.parse(str(name)) == name


@pytest.mark.covers("F14")
@pytest.mark.parametrize(
    "text",
    [
        "notes",
        "step-abc",
        "s000000005-9f20f5ce-df84d2eb.tmp",
        "s5-9f20f5ce-df84d2eb",
        "s0000000005-9f20f5ce-df84d2eb",
        "s000000005-9F20F5CE-df84d2eb",
        "",
    ],
)
def test_foreign_directories_are_no_generations(text: str) -> None:
    assert GenerationName.parse(text) is None


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=20))
def test_generation_names_sort_by_step(steps: list[int]) -> None:
    names = [GenerationName(s, "0" * 8, "0" * 8) for s in steps]
    assert [n.step for n in sorted(names)] == sorted(steps)


def test_attempts_differ_by_state_incarnation_and_ordinal() -> None:
    made = {attempt_id(h, i, n) for h in ("a", "b") for i in ("x", "y") for n in (0, 1)}
    assert len(made) == 8
    assert all(len(a) == 8 and int(a, 16) >= 0 for a in made)


@given(st.text(min_size=1))
def test_member_ids_fit_into_a_signed_64_bit_vector(replica: str) -> None:
    assert 0 <= member_id(replica) < 2**63


def test_files_of_a_generation_have_fixed_names() -> None:
    assert cursor_file("replica-0", 3) == "replica-0-r00003.json"
    assert shard_file(1, 2) == "shard-00001-of-00002.safetensors"
    assert generation_dir("gpt", "s1") == f"{generations_dir('gpt')}/s1" == "gpt/generations/s1"

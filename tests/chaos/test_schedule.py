"""The schedule of faults is the seed's, and only what can be done to a job is drawn."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from chaos.__main__ import main
from chaos.nemeses.acts import flip
from chaos.nemeses.schedule import KINDS, Planned, possible, schedule

pytestmark = pytest.mark.smoke


def first(seed: int, kinds: list[str], n: int = 200) -> list[Planned]:
    return list(itertools.islice(schedule(seed, kinds), n))


def test_a_seed_gives_the_same_schedule_again_and_another_seed_another() -> None:
    kinds = possible(["peers", "group"])
    assert first(7, kinds) == first(7, list(reversed(kinds)))
    assert first(7, kinds) != first(8, kinds)


def test_every_possible_kind_comes_and_its_hold_is_within_bounds() -> None:
    kinds = possible(["peers", "group", "etcd", "etcd3", "network", "proxies", "small-disk"])
    assert set(kinds) == set(KINDS)
    drawn = first(1, kinds, 10 * len(kinds))
    rounds = [drawn[i : i + len(kinds)] for i in range(0, len(drawn), len(kinds))]
    assert all({p.kind for p in one} == set(kinds) for one in rounds)  # each once before any comes again
    assert rounds[0] != rounds[1]
    assert all(KINDS[p.kind].hold[0] <= p.hold <= KINDS[p.kind].hold[1] for p in drawn)
    assert {p.wait for p in drawn} == {"healthy", "moment"}


def test_what_a_job_lacks_is_not_done_to_it() -> None:
    assert not {"kill-etcd", "kill-lighthouse", "kill-launcher", "disk-full"} & set(possible([]))
    with pytest.raises(ValueError, match="kill-etcd"):
        possible(["peers"], ["kill-etcd"])


def test_the_plan_is_printed_and_nothing_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "--seed", "3", "--workload", "solo", "--nemesis", "kill-all", "--kills", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("kind=kill-all" in x for x in lines)


def test_one_bit_of_the_data_is_flipped(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    header = b'{"a": 1}'
    data = len(header).to_bytes(8, "little") + header + bytes(100)
    path.write_bytes(data)
    at = flip(path, random.Random(1))
    changed = path.read_bytes()
    assert at >= 16
    assert [i for i, (a, b) in enumerate(zip(data, changed, strict=True)) if a != b] == [at]
    assert (data[at] ^ changed[at]).bit_count() == 1

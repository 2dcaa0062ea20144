"""What a resume hands on applies once: not to a worker that is restarted later."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.domain.choice import AtLocation, AtStep, Fresh, Newest
from ftckpt.errors import ConfigError
from ftckpt.flows import resume_token
from ftckpt.flows.select import choose
from ftckpt.testing.generations import open_entry
from unit.flows.flowkit import JOB, world


def test_a_token_survives_the_environment(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        token = resume_token.make(choose(w.log, w.store, JOB, AtStep(5)), JOB)
        assert resume_token.read(token.encode(), JOB) == token
        assert (token.tail, token.index, token.location) == (1, 0, w.entries[0].location)
        assert resume_token.read(token.encode(), "other") is None
        assert resume_token.read("", JOB) is None


def test_it_applies_until_the_log_goes_on(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        token = resume_token.make(choose(w.log, w.store, JOB, AtStep(5)), JOB)
        text = token.encode()
        assert resume_token.request(text, JOB, w.log.tail()) == (AtLocation(w.entries[0].location), token)
        entry, opened = open_entry(w.log, w.entries[0], w.states[0], attempt=token.request)
        assert resume_token.request(text, JOB, entry) == (Newest(), token)  # another rank was quicker to open it
        assert choose(w.log, w.store, JOB, resume_token.request(text, JOB, entry)[0]).location == w.entries[0].location
        w.save(8, opened)
        assert resume_token.request(text, JOB, w.log.tail()) == (Newest(), None)
        assert choose(w.log, w.store, JOB).step == 8


def test_another_opening_than_its_own_ends_it(tmp_path: Path) -> None:
    with world(tmp_path / "root", 5, 10) as w:
        token = resume_token.make(choose(w.log, w.store, JOB, AtStep(5)), JOB)
        entry, _ = open_entry(w.log, w.entries[1], w.states[1], attempt="ffffffff")
        assert resume_token.request(token.encode(), JOB, entry) == (Newest(), None)


@pytest.mark.covers("I8")
def test_a_fresh_start_is_not_repeated_once_something_is_committed(tmp_path: Path) -> None:
    with world(tmp_path / "root") as w:
        token = resume_token.make(choose(w.log, w.store, JOB, Fresh()), JOB)
        assert resume_token.request(token.encode(), JOB, None) == (Fresh(), token)
        w.save(5)
        assert resume_token.request(token.encode(), JOB, w.log.tail()) == (Newest(), None)


def test_what_is_no_token_is_an_error() -> None:
    with pytest.raises(ConfigError, match="FTCKPT_RESUME"):
        resume_token.read("newest", JOB)

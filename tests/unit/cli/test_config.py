"""Settings: precedence, where each value came from, and everything that is wrong at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.config import Settings, env_name, launch, load, reading, setting_keys, unknown_variables
from ftckpt.domain.deadlines import Deadlines
from ftckpt.errors import ConfigError


def test_an_argument_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "ftckpt.toml"
    file.write_text('job = "file"\nroot = "/file"\nslots = 1\n[deadlines]\nlog_s = 4\nclose_s = 100\n')
    env = {"FTCKPT_CONFIG": str(file), "FTCKPT_JOB": "env", "FTCKPT_ROOT": "/env", "FTCKPT_DEADLINES_LOG_S": "3"}
    s = load({"job": "argument"}, env=env)
    assert (s.job, s.root, s.slots, s.deadlines.log_s, s.deadlines.close_s, s.on_busy) == ("argument", "/env", 1, 3.0, 100.0, "wait")
    assert s.say("job") == "job='argument' (argument job)"
    assert s.say("root") == "root='/env' (environment FTCKPT_ROOT)"
    assert s.say("slots") == f"slots=1 (file {file}: slots)"
    assert s.say("deadlines.log_s") == "deadlines.log_s=3.0 (environment FTCKPT_DEADLINES_LOG_S)"
    assert s.say("on_busy") == "on_busy='wait' (default)"


def test_defaults_are_taken_at_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for where in ("a", "b"):
        (tmp_path / where).mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / where))
        assert load().runtime_dir == str(tmp_path / where / "ftckpt")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert load().runtime_dir.endswith(f"ftckpt-{os.getuid()}")
    monkeypatch.setenv("FTCKPT_JOB", "later")
    assert load().job == "later"


def test_none_means_not_given_but_for_keep() -> None:
    s = load({"job": None, "keep": None}, env={"FTCKPT_JOB": "env", "FTCKPT_KEEP": "3"})
    assert (s.job, s.keep) == ("env", None)
    assert load(env={"FTCKPT_KEEP": "3"}).keep == 3
    assert load(env={"FTCKPT_KEEP": "all"}).keep is None


@pytest.mark.parametrize(
    ("env", "replica"), [({}, "solo"), ({"REPLICA_GROUP_ID": "3"}, "replica-3"), ({"REPLICA_GROUP_ID": "west"}, "west")]
)
def test_a_replica_is_named_by_its_group_unless_told_otherwise(env: dict[str, str], replica: str) -> None:
    assert load(env=env).replica == replica
    assert load({"replica": "mine"}, env=env).replica == "mine"


@pytest.mark.covers("F78", "I14")
def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    s = load(
        {
            "job": "none",
            "keep": 0,
            "slots": 3,
            "agent_host": "0.0.0.0",
            "secret_file": str(tmp_path / "missing"),
            "min_replica_size": 2,
            "max_replicas": 4,
            "deadlines": Deadlines(log_s=10, term_s=40, slot_s=500),
        },
        env={},
    )
    with pytest.raises(ConfigError) as error:
        s.validate(need=("job", "root"))
    text = str(error.value)
    for part in (
        "root is not given", "FTCKPT_ROOT", "job='none'", "keep=0", "keep=None", "slots=3", "agent_advertise", "secret_file", "two halves",
        "registry_ttl_s", "torchrun kills", "slot_s < group_s",
    ):  # fmt: skip
        assert part in text, part


@pytest.mark.covers("F78")
def test_every_unknown_or_misspelt_value_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('rot = "/x"\nslots = "two"\n[deadlines]\nlogs = 1\n')
    with pytest.raises(ConfigError) as error:
        load({"on_busy": "never", "colour": 1}, file=file, env={"FTCKPT_KEEP": "many"})
    text = str(error.value)
    for part in (
        "rot: there is no such setting",
        "slots",
        "deadlines.logs",
        "argument on_busy",
        "use one of wait, skip",
        "argument colour",
        "environment FTCKPT_KEEP",
    ):
        assert part in text, part


def test_variables_that_mean_nothing_are_known_by_name() -> None:
    env = {"FTCKPT_ROTO": "/x", "FTCKPT_ROOT": "/x", "FTCKPT_DEADLINES_LOG": "1", "FTCKPT_CONFIG": "x", "FTCKPT_RESUME": "{}", "HOME": "/"}
    assert unknown_variables(env) == ["FTCKPT_DEADLINES_LOG", "FTCKPT_ROTO"]


@pytest.mark.parametrize("content", [None, "job = ", b"\xff\xfe"])
def test_a_settings_file_that_is_named_must_be_readable(tmp_path: Path, content: str | bytes | None) -> None:
    file = tmp_path / "x.toml"
    if isinstance(content, str):
        file.write_text(content)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=file, env={})


@pytest.mark.covers("F33")
@pytest.mark.parametrize("job", ["", "none", "a/b"])
def test_a_job_without_a_usable_name_is_refused(job: str) -> None:
    with pytest.raises(ConfigError):
        load({"job": job, "root": "/x"}, env={}).validate(("job", "root"))


@pytest.mark.covers("I11")
def test_the_defaults_are_in_order() -> None:
    assert load({"job": "gpt", "root": "/x"}, env={}).validate(("job", "root")).problems() == []


@pytest.mark.covers("I11", "F78")
@given(st.fixed_dictionaries({}, optional={k: st.floats(0.1, 1000) for k in Deadlines.__struct_fields__}))
def test_no_order_of_deadlines_that_breaks_the_hierarchy_is_accepted(given_: dict[str, float]) -> None:
    d = Deadlines(**given_)
    holds = (
        3 * d.log_s <= d.registry_ttl_s
        and d.tail_poll_s <= d.registry_ttl_s
        and d.log_s < d.agent_start_s
        and d.cursors_s <= min(d.receipts_s, d.cursor_search_s)
        and d.slot_s < d.group_s <= d.load_s
        and d.heal_stall_s < d.heal_s
        and d.step_s <= d.quorum_s
        and d.step_s < d.heal_s
        and d.step_s <= d.capture_s
        and d.term_s < 30
        and d.cursors_s + d.log_s <= d.close_s
    )
    assert (d.problems() == []) == holds


@pytest.mark.parametrize("key", Deadlines.__struct_fields__)
def test_no_wait_without_an_end(key: str) -> None:
    assert any(key in text and "positive" in text for text in Deadlines(**{key: -1.0}).problems())


@pytest.mark.covers("I3")
@pytest.mark.parametrize(
    ("low", "high", "allow", "fine"),
    [(2, 3, False, True), (2, 4, False, False), (2, 4, True, True), (1, 1, False, True), (5, 4, True, False)],
)
def test_two_halves_of_a_job_cannot_both_train_unless_allowed(low: int, high: int, allow: bool, fine: bool) -> None:
    s = Settings(job="gpt", min_replica_size=low, max_replicas=high, allow_split=allow)
    assert (s.problems() == []) is fine


def test_the_launchers_words_are_read_from_the_environment() -> None:
    said = launch(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "TORCHELASTIC_RUN_ID": "x",
            "REPLICA_GROUP_ID": "1",
            "TORCHFT_LIGHTHOUSE": "http://h:1",
            "FTCKPT_RESUME": "{}",
        }
    )
    assert (said.rank, said.world_size, said.elastic, said.replica_group, said.lighthouse, said.resume) == (
        3,
        4,
        True,
        "1",
        "http://h:1",
        "{}",
    )
    assert launch({}).elastic is False
    with pytest.raises(ConfigError, match="RANK"):
        launch({"RANK": "first"})


def test_every_setting_is_documented_with_its_variable() -> None:
    text = (Path(__file__).parents[3] / "docs" / "config.md").read_text()
    missing = [key for key in setting_keys() if f"`{key}`" not in text or f"`{env_name(key)}`" not in text]
    assert missing == []


@pytest.mark.covers("F78")
def test_tiers_that_contradict_each_other_are_refused_all_at_once() -> None:
    given = {"job": "j", "root": "/r", "acknowledge": "first", "keep_local": 0}
    wrong = load(given, env={}).problems()
    assert len([w for w in wrong if "keep_local" in w or "acknowledge" in w]) == 3
    assert any("is the root itself" in w for w in load({"job": "j", "root": "/r", "durable": "/r/"}, env={}).problems())
    assert load({**given, "durable": "s3://b/p", "keep_local": 2}, env={}).problems() == []


def test_a_root_that_a_reader_names_is_not_taken_for_another_roots_first_tier() -> None:
    env = {"FTCKPT_ROOT": "/nvme", "FTCKPT_DURABLE": "s3://b/p", "FTCKPT_ACKNOWLEDGE": "first"}
    assert reading("j", None, None, file=None, env=env).durable == "s3://b/p"
    named = reading("j", "s3://b/p", None, file=None, env=env)
    assert (named.durable, named.problems()) == ("", [])

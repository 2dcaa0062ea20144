"""Real replicas on a real lighthouse: what becomes of steps, states and trajectories when replicas die, lag and differ."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from replica_harness import Handle, World, together

pytestmark = pytest.mark.timeout(120)


@pytest.mark.covers("I3")
def test_two_replicas_move_along_one_trajectory_after_an_empty_first_step(world: World) -> None:
    a, b = world.start("a", "b")
    first = together([a, b])
    later = [together([a, b]) for _ in range(3)][-1]
    print(first, later)
    assert [x["vote"] for x in first] == [True, True]
    assert [x["contributed"] for x in first] == [False, False]
    assert first[0]["w"] == [0.0] * 4
    assert later[0]["h"] == later[1]["h"]
    assert later[0]["w"] == later[1]["w"] == [-3.0] * 4
    assert sorted(later[0]["counts"].values()) == [3, 3]
    assert later[0]["samples"] == 12
    assert [x["writer"] for x in later].count(True) == 1


def ready(world: World, *names: str, **options: object) -> list[Handle]:
    """Replicas that have made the empty step and one real one."""
    handles = world.start(*names, **options)
    together(handles, "until", step=2)
    return handles


@pytest.mark.covers("F61", "I3")
def test_replicas_that_went_two_ways_at_equal_step_never_commit_together(world: World) -> None:
    a, b = ready(world, "a", "b")
    a.send("step", grad=1.0)
    b.send("step", grad=10.0, fail="late")
    assert a.answer()["vote"]
    assert not b.answer()["vote"]
    a.stop()
    alone = b.call("until", step=3, grad=10.0)
    a.resume()
    assert alone["step"] == 3
    assert alone["h"] != a.call("state")["h"]
    seen: dict[str, set[tuple[str, ...]]] = {}
    for _ in range(8):
        for x in together([b, a]):
            if x["vote"]:
                seen.setdefault(x["h"], set()).add(tuple(map(str, x["w"])))
    assert all(len(states) == 1 for states in seen.values()), seen
    last = [h.call("state") for h in (a, b)]
    assert last[0]["h"] == last[1]["h"]
    assert last[0]["w"] == last[1]["w"]
    assert last[0]["step"] >= 6


@pytest.mark.covers("F49", "F58", "I13")
def test_a_killed_replica_heals_bit_equal_and_writes_nothing_while_it_heals(world: World) -> None:
    a, b = ready(world, "a", "b")
    b.kill()
    a.call("until", step=5)
    (b,) = world.start("b")
    before = a.call("state")
    answers = together([a, b])
    assert [x["vote"] for x in answers] == [True, True]
    healing = answers[1]
    assert (healing["healed"], healing["contributed"], healing["writer"]) == (True, False, False)
    assert answers[0]["members"] == (before["member"],)
    assert healing["w"] == answers[0]["w"]
    assert healing["h"] == answers[0]["h"]
    assert healing["counts"] == answers[0]["counts"]
    assert healing["counts"][str(healing["member"])] == 1
    assert together([a, b])[1]["contributed"]


@pytest.mark.covers("F61", "I12")
def test_a_batch_whose_gradient_only_others_committed_counts_as_consumed(world: World) -> None:
    a, b = ready(world, "a", "b")
    a.send("step", draws=3)
    b.send("step", draws=5, fail="late")
    assert a.answer()["counts"] == {str(a.call("state")["member"]): 4, str(b.answer()["member"]): 6}
    assert together([a, b], draws=1)[1]["healed"]
    state = b.call("state")
    assert state["counts"][str(state["member"])] == 6


@pytest.mark.covers("F58")
def test_a_spare_keeps_the_same_state_and_is_not_counted(world: World) -> None:
    three = world.start("a", "b", "c", min_replica_size=2, spares=True)
    together(three, "until", step=2)
    answers = together(three)
    assert len({x["h"] for x in answers}) == 1
    assert len({tuple(x["w"]) for x in answers}) == 1
    assert [x["contributed"] for x in answers].count(False) == 1
    spare = next(x for x in answers if not x["contributed"])
    assert not spare["writer"]
    assert str(spare["member"]) not in answers[0]["counts"]
    assert len(answers[0]["members"]) == 2
    assert len(answers[0]["present"]) == 3


@pytest.mark.covers("F82", "I8")
def test_two_blank_joiners_load_the_tail_while_the_only_replica_with_state_is_paused(world: World) -> None:
    (a,) = ready(world, "a")
    a.call("until", step=4)
    a.call("save", index=0)
    a.stop()
    joiners = world.start("b", "c")
    for _ in range(3):
        for x in together(joiners):
            assert not (x["vote"] and x["step"] <= 4)
    states = together(joiners, "state")
    a.resume()
    assert all(x["loaded"] == [0] for x in states)
    assert states[0]["h"] == states[1]["h"]
    assert states[0]["step"] >= 5


@pytest.mark.covers("I8", "F65")
def test_without_a_readable_log_only_a_replica_healed_from_a_living_peer_votes(world: World) -> None:
    (a,) = ready(world, "a")
    (world.root / "down").touch()
    (b,) = world.start("b")
    answers = together([a, b])
    assert answers[1]["healed"]
    assert [x["vote"] for x in answers] == [True, True]
    a.kill()
    b.kill()
    (c,) = world.start("c")
    refused = [c.call("step") for _ in range(3)]
    assert not any(x["vote"] for x in refused)
    assert "the log cannot be read" in " ".join(refused[-1]["reasons"])
    (world.root / "down").unlink()
    assert c.call("step")["vote"]


@pytest.mark.slow
@pytest.mark.covers("I8", "F65")
def test_a_log_that_stays_unreadable_ends_the_replica_at_its_deadline(world: World) -> None:
    (world.root / "down").touch()
    (a,) = world.start("a", limits={"pause": 0.2, "log_wait": 0.5})
    ends = [a.call("step") for _ in range(8)]
    assert ends[0].get("error") is None
    assert ends[-1]["error"] == "LogUnreachable"


@pytest.mark.covers("I2", "I4")
def test_a_state_behind_the_tail_loads_the_tail_when_nobody_is_ahead(world: World) -> None:
    (a,) = ready(world, "a")
    a.call("save", index=0)
    a.call("until", step=5)
    a.call("save", index=1)
    a.kill()
    (b,) = world.start("b")
    b.call("resume", index=0)
    refused = b.call("step")
    assert not refused["vote"]
    assert (refused["step"], b.call("state")["loaded"]) == (2, [0, 1])
    made = b.call("step")
    assert (made["vote"], made["step"]) == (True, 6)


@pytest.mark.covers("I3")
def test_a_voted_replica_alone_off_the_trajectory_of_the_watched_tail_ends_as_diverged(world: World) -> None:
    a, b = ready(world, "a", "b")
    a.send("step")
    b.send("step", fail="late")
    assert a.answer()["vote"]
    b.answer()
    a.call("save", index=0)
    a.kill()
    b.call("until", step=4)
    b.call("watch")
    ended = b.call("step")
    assert (ended["error"], ended["code"]) == ("Diverged", 8)
    assert b.call("step")["error"] == "Diverged"


@pytest.mark.slow
@pytest.mark.covers("I4")
def test_a_source_off_the_tail_is_refused_without_costing_the_survivor_a_step(world: World) -> None:
    a, b = ready(world, "a", "b")
    a.send("step")
    b.send("step", fail="late")
    a.answer(), b.answer()
    a.call("save", index=0)
    a.kill()
    b.call("until", step=5)  # another way to step 5, and it does not know of the tail
    (c,) = world.start("c", limits={"pause": 0.1, "refusals": 2})
    votes, told = [], ""
    for _ in range(4):
        x, y = together([b, c])
        if "error" in x or "error" in y:
            break
        votes.append((x["vote"], y["vote"]))
        told += " ".join(y["reasons"])
    assert votes[0] == (True, False)
    assert "does not hold tail #0" in told
    assert set(c.call("state")["loaded"]) == {0}


@pytest.mark.covers("F56")
def test_a_replica_that_can_never_heal_ends_after_bounded_attempts_with_its_own_code(world: World) -> None:
    (a,) = ready(world, "a")
    (b,) = world.start("b", limits={"pause": 0.02, "attempts": 3}, fail_fetches=99)
    ends = None
    for _ in range(8):
        x, y = together([a, b])
        assert x["vote"], x
        if "error" in y:
            ends = y
            break
    assert ends is not None
    assert (ends["error"], ends["code"]) == ("HealFailed", 9)


@pytest.mark.covers("F54", "F56", "I3")
def test_a_joiner_whose_heal_broke_off_in_its_live_state_is_blank_until_the_next_one(world: World) -> None:
    a, other = ready(world, "a", "other")
    a.call("save", index=0)
    other.kill()
    a.call("until", step=5)
    (b,) = world.start("b", fail_fetches=1, spoils=True)
    b.call("resume", index=0)
    x, y = together([a, b])
    assert (x["vote"], y["vote"], y["contributed"], y["healed"]) == (True, False, False, False)
    assert -999.0 in y["w"]
    assert y["blank"]  # not to be saved, and the next vote is refused unless it healed or loaded the tail
    assert x["members"] == (x["member"],)
    x, y = together([a, b])
    assert (y["vote"], y["healed"], y["blank"], y["w"], y["h"]) == (True, True, False, x["w"], x["h"])
    assert together([a, b])[1]["contributed"]
    assert b.call("state")["loaded"] == [0]


@pytest.mark.covers("F54", "F56", "I3", "I8")
def test_a_joiner_whose_heal_broke_off_in_its_live_state_loads_the_tail_when_its_source_is_gone(world: World) -> None:
    (a,) = ready(world, "a")
    a.call("save", index=0)
    kept = a.call("state")
    a.call("until", step=5)
    (b,) = world.start("b", fail_fetches=1, spoils=True)
    b.call("resume", index=0)
    together([a, b])
    a.kill()
    assert -999.0 in b.call("state")["w"]
    made = b.call("until", step=kept["step"] + 1)
    assert made["loaded"] == [0, 0]
    assert made["w"] == [w - 1.0 for w in kept["w"]]


@pytest.mark.slow
@pytest.mark.covers("I3")
def test_a_state_that_was_fetched_but_never_voted_on_is_given_up(world: World) -> None:
    (a,) = ready(world, "a")
    a.call("until", step=4)
    (b,) = world.start("b")
    b.send("step", skip="after_quorum")
    time.sleep(0.2)
    a.send("step")
    b.answer()
    a.answer()
    answers = [together([a, b]) for _ in range(3)][-1]
    assert answers[0]["h"] == answers[1]["h"]
    assert answers[0]["w"] == answers[1]["w"]


@pytest.mark.covers("I3")
def test_an_error_while_a_fetched_state_is_loaded_ends_the_replica(world: World) -> None:
    (a,) = ready(world, "a")
    (b,) = world.start("b", fail_load=True)
    _, ended = together([a, b])
    assert ended["error"] == "ValueError"
    assert b.call("step")["error"] == "ValueError"
    b.kill()
    assert a.call("until", step=6)["step"] == 6


@pytest.mark.parametrize("wrap", ["plain", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_peer_killed_in_the_allreduce_costs_survivors_one_uncommitted_step(world: World, wrap: str) -> None:
    three = world.start("a", "b", "c")
    together(three, "use_model", wrap=wrap)
    for _ in range(3):
        answers = together(three)
    assert len({tuple(x["weights"]) for x in answers}) == 1
    a, b, c = three
    a.send("step")
    b.send("step")
    c.call("step", skip="after_quorum")
    c.kill()
    lost = [a.answer(), b.answer()]
    assert [x.get("vote") for x in lost] == [False, False], lost
    assert max(x["seconds"] for x in lost) < 5
    again = together([a, b])
    assert [x["vote"] for x in again] == [True, True]
    assert again[0]["weights"] == again[1]["weights"]
    assert again[0]["h"] == again[1]["h"]


@pytest.mark.slow
@pytest.mark.covers("F80", "I13")
def test_the_sync_quorum_heals_before_the_forward_and_counts_the_healed(world: World) -> None:
    a, b = ready(world, "a", "b", use_async_quorum=False)
    b.kill()
    a.call("until", step=4)
    (b,) = world.start("b", use_async_quorum=False)
    answers = together([a, b])
    assert [x["vote"] for x in answers] == [True, True]
    assert (answers[1]["healed"], answers[1]["contributed"]) == (True, True)
    assert answers[0]["h"] == answers[1]["h"]
    assert answers[0]["w"] == answers[1]["w"]


@pytest.mark.covers("F75", "I10")
def test_the_managers_server_listens_on_the_configured_address_only(world: World) -> None:
    (a,) = world.start("a")
    port = a.call("address")["port"]
    listening = {c.laddr.ip for c in psutil.Process(a.pid).net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    assert listening == {"127.0.0.1"}


@pytest.mark.slow
def test_a_restart_of_the_lighthouse_costs_time_and_no_state(tmp_path: Path) -> None:
    world = World(tmp_path, apart=True)
    try:
        a, b = ready(world, "a", "b")
        before = a.call("state")
        world.restart_lighthouse(2)
        answers = together([a, b])
        assert [x["vote"] for x in answers] == [True, True], answers
        assert answers[0]["step"] == before["step"] + 1
        assert answers[0]["h"] == answers[1]["h"]
    finally:
        world.close()


@pytest.mark.slow
@pytest.mark.covers("I3")
def test_a_restarted_lighthouse_that_counts_from_one_again_does_not_mix_members_of_two_groups(tmp_path: Path) -> None:
    world = World(tmp_path, apart=True)
    try:
        a, b = ready(world, "a", "b")  # the first quorum of the first lighthouse
        a.stop()
        world.restart_lighthouse(1)
        alone = b.call("step")  # the first quorum of the second, with the process group of two still at hand
        assert alone["vote"], alone
        assert len(alone["present"]) == 1
        a.resume()
        time.sleep(1)
        answers = together([b, a])
        assert [x["vote"] for x in answers] == [True, True], answers
        assert answers[1]["healed"]
        assert answers[0]["w"] == answers[1]["w"]
    finally:
        world.close()

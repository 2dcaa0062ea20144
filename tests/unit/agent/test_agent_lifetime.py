"""When an agent goes on and when it ends."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.agent.lifetime import GRACE_S, Standing, decide
from ftckpt.link.config import AgentConfig

CONFIG = AgentConfig(
    job="j", replica="a", rank=0, group_world_size=1, incarnation="i", root="r", log="l", runtime_dir="d",
    linger_s=30.0, commit_linger_s=300.0, cursors_s=20.0, term_budget_s=25.0,
)  # fmt: skip
IDLE = Standing(attached=False, gone_since=0.0, bye=False, working=False, offering=False, serving=False)

TABLE = [
    # what is special                                              seconds since  what to do
    ({"attached": True, "working": True},                          1e6,           "run"),
    ({"bye": True},                                                0.0,           "exit"),
    ({"bye": True, "working": True},                               100.0,         "run"),
    ({"bye": True, "serving": True},                               29.0,          "run"),
    ({"bye": True, "serving": True},                               31.0,          "exit"),
    ({"bye": True, "offering": True},                              39.0,          "run"),
    ({"bye": True, "offering": True},                              41.0,          "exit"),
    ({},                                                           29.0,          "run"),
    ({},                                                           30.0,          "exit"),
    ({"working": True},                                            299.0,         "run"),
    ({"working": True},                                            300.0,         "give up"),
    ({"working": True},                                            320.0,         "exit"),
    ({"terminated": 0.0},                                          0.0,           "exit"),
    ({"terminated": 0.0, "attached": True},                        10.0,          "run"),
    ({"terminated": 0.0, "working": True},                         21.0,          "give up"),
    ({"terminated": 0.0, "attached": True, "working": True},       25.0,          "exit"),
]  # fmt: skip


@pytest.mark.covers("I11", "F77")
@pytest.mark.parametrize(("special", "since", "step"), TABLE)
def test_what_to_do(special: dict[str, object], since: float, step: str) -> None:
    assert decide(since, msgspec.structs.replace(IDLE, **special), CONFIG) == step


@pytest.mark.covers("I11")
@given(
    st.builds(
        Standing,
        attached=st.just(False),
        gone_since=st.just(0.0),
        bye=st.booleans(),
        working=st.booleans(),
        offering=st.booleans(),
        serving=st.booleans(),
    )
)
def test_without_a_trainer_it_always_ends(standing: Standing) -> None:
    assert decide(CONFIG.commit_linger_s + GRACE_S, standing, CONFIG) == "exit"

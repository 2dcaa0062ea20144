"""Saving less over two tiers: each of them has what a generation in it refers to."""

from __future__ import annotations

import shutil

import pytest
from agent_harness import Rig, until
from test_agent_reuse import generations, lora, save
from test_agent_tiers import Tiers

from ftckpt import wiring
from ftckpt.flows.read import open_generation
from ftckpt.flows.verify import verify


@pytest.mark.covers("I7", "I9", "I13")
def test_the_durable_tier_alone_has_all_that_is_referred_to_and_lets_go_of_the_rest(rig: Rig) -> None:
    tiers = Tiers(rig)
    trainer = tiers.trainer(reuse=True, keep="last:1")
    for step in range(1, 5):
        save(trainer, lora(step))
    assert until(lambda: len(generations(rig)) == 1 and len(tiers.names(tiers.durable)) == 2, 15.0)
    (newest,) = generations(rig)
    assert set(tiers.names(tiers.durable)) == {newest.location, *newest.refers}
    shutil.rmtree(tiers.first / "job" / "generations")
    durable = wiring.open_store(str(tiers.durable))
    assert verify(durable, "job", newest.location, newest).sound
    with open_generation(tiers.store(), "job", newest.location, newest) as g:
        found = {t.name: bytes(i.range(t.chunks[0].begin, t.chunks[0].end)) for i in g.images for t in i.table.tensors}
    assert found == {name: a.tobytes() for name, a in lora(4).items()}

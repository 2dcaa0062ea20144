"""What a save and a restore cost in memory and garbage; times are measured by the benchmarks."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from state_tools import image_of, registry, take
from torch import nn

from ftckpt.format.leaves import decode_leaves
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.garbage import without_gc
from ftckpt.trainer.group import Group
from ftckpt.trainer.restore import restore

MB = 1 << 20


def trained(width, layers):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    opt = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    return model, opt


def status(key):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


@pytest.mark.covers("A15", "I11")
def test_a_save_makes_no_cyclic_garbage_and_leaves_no_thread():
    model, opt = trained(8, 20)
    capturer = Capturer(registry(model=model, opt=opt, tree={"a": [1, {"b": torch.ones(2)}]}), Group())
    target = memoryview(bytearray(capturer.prepare().table.image_bytes))
    take(capturer, target)
    gc.collect()
    threads = threading.active_count()
    gc.disable()
    try:
        for _ in range(20):
            take(capturer, target)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert threading.active_count() == threads


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.covers("I11")
def test_a_restore_needs_no_second_copy_of_the_state(threads):
    model, opt = trained(1024, 8)  # 100 MB
    states = registry(model=model, opt=opt)
    plan, leaves, memory = take(Capturer(states, Group()))
    image, docs = image_of(plan.table, memory), decode_leaves(leaves, "leaves")
    restore(states, [image], docs, plan.states, threads=threads)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of resident memory cannot be reset here")
    before = status("VmRSS")
    restore(states, [image], docs, plan.states, threads=threads)
    assert status("VmHWM") - before < 8 * MB
    assert plan.table.image_bytes > 90 * MB


@pytest.mark.quick
def test_the_collector_comes_back_after_the_last_of_two_threads_that_kept_it_away():
    inside, go_on = threading.Event(), threading.Event()

    def other():
        with without_gc():
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=other)
    with without_gc():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()
    go_on.set()
    thread.join(30)
    assert gc.isenabled()


@pytest.mark.quick
def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with without_gc(), without_gc():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()

"""Live memory that several stored values would fill: it is filled where they agree on every byte, and refused otherwise, before anything changes."""

from __future__ import annotations

import copy

import pytest
import torch
from state_tools import registry, same, same_nested, save
from torch import nn

from ftckpt.errors import Mismatch

FLAT = torch.arange(12.0)


class Views(nn.Module):
    """Parameters and buffers that are what ``views`` makes of one flat memory; ``apart``: copies of that."""

    def __init__(self, views, apart=False, fill=0.0):
        super().__init__()
        flat = FLAT.clone() if fill is None else torch.full((12,), fill)
        for name, view in views.items():
            tensor = view(flat)
            self.register_buffer(name, tensor.clone() if apart else tensor)


OVERLAPPING = {
    "a flat tensor and its parts": {"flat": lambda f: f, "a": lambda f: f[:6].view(2, 3), "b": lambda f: f[6:]},
    "in part": {"a": lambda f: f[:8], "b": lambda f: f[4:]},
    "transposed": {"a": lambda f: f.view(3, 4), "b": lambda f: f.view(3, 4).t()},
    "another shape": {"a": lambda f: f, "b": lambda f: f.view(3, 4)},
    "another dtype": {"a": lambda f: f, "b": lambda f: f.view(torch.int32)},
    "halves of it": {"a": lambda f: f, "b": lambda f: f.view(torch.int16)[3:9]},
    "every second": {"a": lambda f: f, "b": lambda f: f[::2]},
    "windows of itself": {"a": lambda f: f.unfold(0, 4, 2)},
    "expanded": {"a": lambda f: f[3:4].expand(5, 4)},
    "expanded and whole": {"a": lambda f: f[3:4].expand(5), "b": lambda f: f},
    "complex and its conjugate": {"a": lambda f: f.view(torch.complex64), "b": lambda f: f.view(torch.complex64).conj(), "c": lambda f: f},
    "negative": {"a": lambda f: f.view(torch.complex64).conj().imag, "b": lambda f: f},
}


@pytest.mark.covers("F41", "F42", "B5")
@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING)
def test_memory_shared_in_part_comes_back_where_it_was_stored_likewise_and_is_refused_otherwise(views):
    saved = save({"model": Views(views, fill=None)})
    live = Views(views)
    saved.load(registry(model=live))
    want = {name: view(FLAT.clone()) for name, view in views.items()}
    assert all(same(getattr(live, name).resolve_conj().resolve_neg(), want[name].resolve_conj().resolve_neg()) for name in views)
    other = Views(views, apart=True, fill=None)
    for number, buffer in enumerate(other.buffers(), start=1):
        buffer.copy_(torch.arange(number, buffer.numel() + number).view(buffer.shape))
    live, wrote = Views(views), save({"model": other})
    with pytest.raises(Mismatch, match=r"share.? memory here[\s\S]*nothing was changed"):
        wrote.load(registry(model=live))
    assert all(
        same_nested(getattr(live, name).resolve_conj().resolve_neg(), getattr(Views(views), name).resolve_conj().resolve_neg())
        for name in views
    )
    alike = save({"model": Views(views, apart=True, fill=None)})  # stored apart, with values that agree
    alike.load(registry(model=live))
    assert all(same(getattr(live, name).resolve_conj().resolve_neg(), want[name].resolve_conj().resolve_neg()) for name in views)


def test_what_lies_between_another_ones_elements_is_no_overlap():
    views = {"left": lambda f: f.view(3, 4)[:, :2], "right": lambda f: f.view(3, 4)[:, 2:], "none": lambda f: f[5:5]}
    one = Views(views, apart=True)
    for buffer in one.buffers():
        buffer.normal_()
    live = Views(views)
    save({"model": one}).load(registry(model=live))
    assert same_nested(dict(live.state_dict()), dict(one.state_dict()))


@pytest.mark.covers("F41", "B5")
def test_states_of_all_kinds_that_share_memory_are_looked_at_together_and_the_first_that_differs_is_named():
    one = nn.Linear(2, 2, bias=False)
    saved = save({"model": one, "tree": {"part": one.weight.detach()[0] + 1, "lr": torch.tensor(0.5)}})
    live = nn.Linear(2, 2, bias=False)
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(Mismatch, match=r"tree/part shares memory here with model/weight"):
        saved.load(registry(model=live, tree={"part": live.weight.detach()[0], "lr": torch.tensor(0.0)}))
    assert same_nested(before, live.state_dict())
    fine = save({"model": one, "tree": {"part": one.weight.detach()[0].clone()}})
    fine.load(registry(model=live, tree={"part": live.weight.detach()[0]}))
    assert same(live.weight, one.weight)


def test_overlap_counts_after_a_conversion():
    views = {"a": lambda f: f, "b": lambda f: f[4:]}
    one = Views(views, fill=None).half()
    live = Views(views)
    save({"model": one}).load(registry(model=live), strict="cast")
    assert same(live.a, FLAT)
    one.b[0] += 1
    with pytest.raises(Mismatch, match=r"model/b shares memory here with model/a"):
        save({"model": Views(views, apart=True, fill=None).half(), "other": {}}).load(
            registry(model=Views({**views, "b": lambda f: f[3:11]})), strict="cast"
        )


# ---------------------------------------------------------------- options of optimizers that are tensors
def adam(lr, seed=1):
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    return {"model": model, "opt": torch.optim.AdamW(model.parameters(), lr=lr, foreach=False, capturable=False)}


@pytest.mark.covers("B5", "F34")
@pytest.mark.parametrize(
    ("stored", "live", "says"),
    [(torch.tensor([0.1]), torch.tensor(0.2), "lr has shape"), (torch.tensor(0.1), torch.tensor([0.2]), "lr has shape"),
     (torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.2), "lr is float32, stored is float64"),
     (0.1, torch.tensor(0.2), "cannot hold the stored number 0.1"), (1e39, torch.tensor(0.2), r"cannot hold the stored number 1e\+39(\n|$)"),
     (0.5, torch.tensor([0.2]), "stored is the number 0.5")],
)  # fmt: skip
def test_a_learning_rate_that_does_not_fit_is_told_with_all_else_before_anything_changes(stored, live, says):
    saved = save({**adam(stored), "tree": {"n": 1}})
    here = {**adam(live, seed=2), "tree": [1]}
    before = copy.deepcopy((here["model"].state_dict(), here["opt"].state_dict()))
    with pytest.raises(Mismatch, match=says) as caught:
        saved.load(registry(**here))
    assert "it is a list" in str(caught.value)
    assert same_nested(before, (here["model"].state_dict(), here["opt"].state_dict()))


def test_a_learning_rate_is_converted_on_request_and_one_that_fits_comes_as_it_was():
    for stored, live, mode in ((torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.2), "cast"), (0.1, torch.tensor(0.2), "cast"),
                               (0.5, torch.tensor(0.2), "exact"), (float("nan"), torch.tensor(0.2), "exact")):  # fmt: skip
        here = adam(live)
        if isinstance(stored, float) and stored != stored:
            one = adam(0.1)
            one["opt"].param_groups[0]["lr"] = stored
        else:
            one = adam(stored)
        report = save(one).load(registry(**here), strict={"opt": mode}).states["opt"]
        assert here["opt"].param_groups[0]["lr"] is live
        assert torch.equal(live.nan_to_num(7), torch.as_tensor(stored).to(live.dtype).nan_to_num(7))
        assert report.cast == (["group 0: lr"] if mode == "cast" else [])
    here = adam(0.2)
    save(adam(torch.tensor(0.1, dtype=torch.float64))).load(registry(**here))
    assert same(here["opt"].param_groups[0]["lr"], torch.tensor(0.1, dtype=torch.float64))


def test_one_tensor_that_is_the_rate_of_two_groups_cannot_take_two_values():
    def two(first, second):
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        groups = [{"params": model[0].parameters(), "lr": first}, {"params": model[1].parameters(), "lr": second}]
        return {"model": model, "opt": torch.optim.AdamW(groups, foreach=False)}

    lr = torch.tensor(0.25)
    for first, second in ((torch.tensor(0.5), torch.tensor(0.75)), (0.5, 0.75)):
        with pytest.raises(Mismatch, match=r"opt/group 1: lr shares memory here with opt/group 0: lr"):
            save(two(first, second)).load(registry(**two(lr, lr)))
        assert lr.item() == 0.25
        save(two(first, first)).load(registry(**two(lr, lr)))
        assert lr.item() == 0.5
        lr.fill_(0.25)


# ---------------------------------------------------------------- what the message says to do
@pytest.mark.covers("B5", "I14")
@pytest.mark.parametrize(
    ("live", "words"),
    [(nn.Linear(2, 3), ()), (nn.Linear(2, 2, bias=False), ("lenient",)), (nn.Linear(2, 2).half(), ("cast",)), (nn.Linear(3, 2, bias=False).half(), ("lenient",))],
)  # fmt: skip
def test_what_is_to_be_done_names_only_what_would_help(live, words):
    with pytest.raises(Mismatch) as caught:
        save({"model": nn.Linear(2, 2)}).load(registry(model=live))
    assert [w for w in ("lenient", "cast", "fresh") if w in str(caught.value.todo)] == list(words)


def test_live_tensors_of_kinds_that_cannot_be_filled_are_told_with_all_else():
    saved = save({"tree": {"w": torch.ones(2, 2)}, "model": nn.Linear(2, 2)})
    live = nn.Linear(2, 2)
    live.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(Mismatch, match=r"weight is a sparse_coo tensor"):
        saved.load(registry(model=live))
    gone = nn.Linear(2, 2)
    gone.weight.data.untyped_storage().resize_(0)
    with pytest.raises(Mismatch, match=r"weight has 0 bytes of memory"):
        saved.load(registry(model=gone))

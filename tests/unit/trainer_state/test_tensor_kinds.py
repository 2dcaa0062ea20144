"""Every kind of tensor and value: comes back bit for bit with its type, or is refused at prepare with its key."""

from __future__ import annotations

import collections
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_tools import registry, same, same_nested, save, take
from torch import nn

from ftckpt.errors import ConfigError, Damaged, Mismatch, Unstorable
from ftckpt.format.dtypes import known_dtype
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.states import StateRegistry

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # torch says so itself

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def random_bits(shape, dtype, seed=0):
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def through(value, **options):
    """A value saved as a tree and loaded into an empty one."""
    out = {}
    saved = save({"t": {"value": value}})
    saved.load(registry(t=out), **options)
    return out["value"]


@pytest.mark.covers("F44", "I5")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTIZED], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, shape):
    tensor = random_bits(shape, dtype)
    assert same(through(tensor), tensor)
    module = nn.Module()
    module.register_buffer("x", random_bits(shape, dtype))
    fresh = nn.Module()
    fresh.register_buffer("x", torch.empty_like(tensor))
    save({"m": module}).load(registry(m=fresh))
    assert same(fresh.x, tensor)


@pytest.mark.covers("F44")
def test_every_dtype_of_this_torch_is_either_known_or_quantized():
    assert {d for d in DTYPES if not known_dtype(str(d).removeprefix("torch."))} == QUANTIZED


class Oddity(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": lambda: torch.ones(3, device="meta"),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "subclass": lambda: torch.Tensor._make_subclass(Oddity, torch.ones(3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.covers("F41", "F44", "C4")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("where", ["tree", "buffer"])
def test_what_cannot_be_stored_is_refused_with_its_key_before_any_byte(kind, where):
    module = nn.Module()
    states = {"tree": {"s": {"deep": [{"x": REFUSED[kind]()}]}}, "buffer": {"s": module}}[where]
    if where == "buffer":
        module.register_buffer("x", REFUSED[kind]())
    with pytest.raises(Unstorable, match="s/deep/~i0/x" if where == "tree" else "s/x"):
        Capturer(registry(**states), Group()).prepare()


@pytest.mark.covers("F41")
def test_a_lazy_module_is_refused_until_it_has_a_shape():
    module = nn.LazyLinear(3)
    with pytest.raises(Unstorable, match="m/weight"):
        Capturer(registry(m=module), Group()).prepare()
    module(torch.ones(1, 2))
    save({"m": module})


VIEWS = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::2],
    "expanded": lambda x: x[:1].expand(6, 6),
    "channels-last": lambda x: x.reshape(1, 4, 3, 3).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(2, 3, 6).permute(2, 0, 1),
    "offset": lambda x: x.view(-1)[7:19],
    "conj": lambda x: torch.complex(x, x + 1).conj(),
    "neg": lambda x: torch.complex(x, x + 1).conj().imag,
    "scalar of a row": lambda x: x[2, 3],
}


@pytest.mark.covers("F41", "I5")
@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_stored_as_what_they_show_and_fill_any_other_layout(kind):
    tensor = VIEWS[kind](torch.randn(6, 6))
    assert same(through(tensor), tensor.resolve_conj().resolve_neg())
    module, fresh, flat = nn.Module(), nn.Module(), nn.Module()
    module.register_buffer("x", tensor)
    fresh.register_buffer("x", VIEWS[kind](torch.randn(6, 6)))
    flat.register_buffer("x", torch.zeros(tensor.shape, dtype=tensor.dtype))
    saved = save({"m": module})
    for target in (fresh, flat):
        strides = target.x.stride()
        saved.load(registry(m=target))
        assert torch.equal(target.x, tensor)
        assert target.x.stride() == strides
    save({"m": flat}).load(registry(m=fresh))
    assert torch.equal(fresh.x, tensor)


@pytest.mark.covers("F41")
def test_differing_values_do_not_go_into_an_expanded_tensor():
    module, expanded = nn.Module(), nn.Module()
    module.register_buffer("x", torch.arange(6.0).view(2, 3))
    expanded.register_buffer("x", torch.zeros(1, 3).expand(2, 3))
    with pytest.raises(Mismatch, match="expanded"):
        save({"m": module}).load(registry(m=expanded))
    assert expanded.x.sum() == 0


@pytest.mark.covers("F40")
def test_shared_memory_is_stored_once_and_shared_again_and_equal_copies_stay_apart():
    a, b = torch.randn(8), torch.randn(8)
    saved = save({"t": {"a": a, "again": a, "view": a.view(8), "half": a[:4], "b": b, "copy": b.clone()}})
    assert saved.names() == {"t/a", "t/half", "t/b", "t/copy"}
    out = {}
    saved.load(registry(t=out))
    assert out["a"].data_ptr() == out["again"].data_ptr() == out["view"].data_ptr()
    assert out["b"].data_ptr() != out["copy"].data_ptr()
    assert same(out["half"], a[:4])


@pytest.mark.covers("F40")
def test_what_is_shared_between_states_is_stored_once():
    model = nn.Linear(4, 4)
    saved = save({"model": model, "best": {"w": model.weight}})
    assert saved.names() == {"model/weight", "model/bias"}
    out, fresh = {}, nn.Linear(4, 4)
    saved.load(registry(model=fresh, best=out))
    assert same(out["w"], model.weight)
    assert type(out["w"]) is nn.Parameter
    assert out["w"].requires_grad


@pytest.mark.covers("F37")
def test_a_dict_takes_exactly_what_was_stored():
    out = {"epoch": 0, "hist": [{"a": 1}], "other": 3}
    save({"t": {"epoch": 7, "hist": [], "name": "x"}}).load(registry(t=out))
    assert out == {"epoch": 7, "hist": [], "name": "x"}


@pytest.mark.covers("F37")
def test_tensors_in_a_live_dict_keep_their_memory():
    shadow = torch.zeros(3)
    out = {"ema": {"w": shadow, "other": torch.zeros(2)}}
    save({"t": {"ema": {"w": torch.arange(3.0), "other": torch.arange(4.0)}}}).load(registry(t=out))
    assert out["ema"]["w"] is shadow
    assert shadow.tolist() == [0, 1, 2]
    assert out["ema"]["other"].tolist() == [0, 1, 2, 3]


@pytest.mark.covers("F38", "F39")
def test_values_come_back_with_their_types():
    value = {
        "a.b": 1, "a": {"b": 2}, 3: "int", (1, 2): "tuple", "big": 2**70, "nan": float("nan"), "neg": -0.0, "t": (1, [2]),
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "np": np.arange(3), "od": collections.OrderedDict(z=1),
        "format": torch.channels_last,
    }  # fmt: skip
    out = through(value)
    np.testing.assert_array_equal(out.pop("np"), value.pop("np"))
    assert same_nested(out, value)


@pytest.mark.covers("F38")
def test_a_value_that_cannot_be_stored_is_refused_with_its_key():
    with pytest.raises(Unstorable, match=r"t/a/~i1/f"):
        Capturer(registry(t={"a": [0, {"f": lambda: 0}]}), Group()).prepare()


@pytest.mark.covers("F42")
def test_strange_keys_come_back():
    keys = ["", "/", "a/b", "..", "~", "~1", "ü", "x" * 4096, 0, "0", None, True, ("a", 1)]
    value = {k: torch.tensor(float(i)) for i, k in enumerate(keys)}
    out = through(value)
    assert list(out) == keys
    assert same_nested(out, value)


class Strange(nn.Module):
    """Extra state, a buffer that is not kept, and a value that only its own ``state_dict`` makes."""

    def __init__(self, computed=False):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.seen = {"n": 0, "t": torch.zeros(2)}
        self.computed = computed

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        if self.computed:
            found["doubled"] = self.w.detach() * 2
        return found

    def load_state_dict(self, found, strict=True):
        if self.computed:
            self.loaded = found.pop("doubled")
        return super().load_state_dict(found, strict)


@pytest.mark.parametrize("computed", [False, True])
def test_extra_state_and_computed_values_of_modules_come_back(computed):
    one, two = Strange(computed), Strange(computed)
    one.seen = {"n": 4, "t": torch.ones(2)}
    saved = save({"m": one})
    scratch = two.scratch.clone()
    saved.load(registry(m=two))
    assert same_nested(two.seen, one.seen)
    assert same(two.w, one.w)
    assert same(two.kept, one.kept)
    assert same(two.scratch, scratch)
    assert not computed or same(two.loaded, one.w.detach() * 2)


@pytest.mark.covers("I5", "F53")
def test_nothing_that_changes_after_capture_changes_the_image():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    tree = {"t": torch.ones(3), "n": [1]}
    states = registry(model=model, opt=opt, tree=tree)
    model(torch.randn(3, 4)).sum().backward()
    opt.step()
    capturer = Capturer(states, Group())
    plan, leaves, memory = take(capturer)
    before = bytes(memory)
    model(torch.randn(3, 4)).sum().backward()
    opt.step()
    opt.param_groups[0]["lr"].fill_(7)
    tree["t"].zero_()
    tree["n"].append(2)
    assert bytes(memory) == before
    assert b"[1]" in leaves
    after = take(capturer)[2]
    assert bytes(after) != before
    assert len(after) == len(before)
    assert plan.table.image_bytes == len(before)


@pytest.mark.covers("I5", "F53")
def test_a_fill_on_another_thread_while_forward_runs_holds_the_buffers_of_the_boundary():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    capturer = Capturer(registry(model=model), Group())
    x = torch.randn(32, 64)
    for _ in range(10):
        model(x + torch.randn(()))
        plan = capturer.prepare()
        frozen = capturer.freeze()
        expected = {k: v.clone() for k, v in model.state_dict().items()}
        memory = memoryview(bytearray(plan.table.image_bytes))
        thread = threading.Thread(target=capturer.fill, args=(plan, frozen, memory))
        model(x)  # mutates running statistics before and while the image is filled
        thread.start()
        model(x)
        thread.join(10)
        for entry in plan.table.tensors:
            chunk = entry.chunks[0]
            assert bytes(memory[chunk.begin : chunk.end]) == expected[entry.name.removeprefix("model/")].numpy().tobytes(), entry.name
        frozen.release()


def test_the_plan_is_kept_until_the_structure_changes_and_its_number_changes_only_with_the_table():
    model = nn.Linear(3, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tree = {"n": 1}
    capturer = Capturer(registry(model=model, opt=opt, tree=tree), Group())
    first = capturer.prepare()
    tree["n"] = 2
    assert capturer.prepare() is first
    model.weight.data = torch.randn(3, 3)  # other memory, same table
    moved = capturer.prepare()
    assert moved is not first
    assert moved.layout_id == first.layout_id
    frozen, memory = capturer.freeze(), memoryview(bytearray(moved.table.image_bytes))
    capturer.fill(moved, frozen, memory)
    entry = next(e for e in moved.table.tensors if e.name == "model/weight")
    assert bytes(memory[entry.chunks[0].begin : entry.chunks[0].end]) == model.weight.detach().numpy().tobytes()
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    stepped = capturer.prepare()
    assert stepped.layout_id == first.layout_id + 1
    tree["x"] = torch.ones(1)
    assert capturer.prepare().layout_id == first.layout_id + 2
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert capturer.prepare().layout_id == first.layout_id + 2  # groups are leaves, no tensors yet
    model.weight = nn.Parameter(torch.randn(4, 3))
    assert next(e for e in capturer.prepare().table.tensors if e.name == "model/weight").shape == (4, 3)


def test_frozen_memory_is_used_again_and_a_changed_tree_needs_a_new_plan():
    model = nn.BatchNorm1d(4)
    tree = {}
    capturer = Capturer(registry(model=model, tree=tree), Group())
    plan = capturer.prepare()
    frozen = capturer.freeze()
    where = [t.data_ptr() for batch in frozen.copies for t in batch]
    frozen.release()
    again = capturer.freeze()
    assert [t.data_ptr() for batch in again.copies for t in batch] == where
    with pytest.raises(ConfigError, match="released"):
        capturer.fill(plan, frozen, memoryview(bytearray(plan.table.image_bytes)))
    tree["new"] = torch.ones(2)
    with pytest.raises(ConfigError, match="tree/new"):
        capturer.freeze()


def test_views_do_not_hold_a_target_after_release():
    capturer = Capturer(registry(model=nn.Linear(3, 3)), Group())
    target = bytearray(capturer.prepare().table.image_bytes)
    take(capturer, memoryview(target))
    with pytest.raises(BufferError):
        target.append(0)
    capturer.release()
    target.append(0)


def test_an_image_without_tensors_is_empty_and_loads():
    out = {}
    saved = save({"t": {"a": 1}})
    assert saved.images[0].table.image_bytes == 0
    saved.load(registry(t=out))
    assert out == {"a": 1}


def test_a_flipped_byte_is_damage_and_leaves_learning_rate_and_optimizer_as_they_were():
    model = nn.Linear(3, 3)
    opt = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    saved = save({"model": model, "opt": opt, "tree": {"n": 1}})
    image = saved.images[0]
    image._memory = memoryview(bytearray(image._memory))
    image._memory[5] ^= 1
    fresh = nn.Linear(3, 3)
    other, tree = torch.optim.AdamW(fresh.parameters(), lr=0.1), {"n": 0}
    with pytest.raises(Damaged):
        saved.load(registry(model=fresh, opt=other, tree=tree))
    assert other.param_groups[0]["lr"] == 0.1
    assert not other.state
    assert tree == {"n": 0}


@pytest.mark.covers("F42")
def test_many_small_tensors_come_back():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()).double())

    one, two = nn.ModuleList(Small() for _ in range(3000)), nn.ModuleList(Small() for _ in range(3000))
    save({"m": one}).load(registry(m=two))
    assert all(same(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors_over_many_blocks_come_back_in_any_memory_format(threads):
    one, two = nn.Module(), nn.Module()
    one.w = nn.Parameter(torch.randn(40, 30, 50, 60))
    two.w = nn.Parameter(torch.zeros(40, 30, 50, 60).to(memory_format=torch.channels_last))
    one.v, two.v = nn.Parameter(torch.randn(1001, 1003)), nn.Parameter(torch.zeros(1003, 1001).t())
    save({"m": one}).load(registry(m=two), threads=threads)
    assert torch.equal(one.w, two.w)
    assert torch.equal(one.v, two.v)


# ---------------------------------------------------------------- random values
@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from([d for d in DTYPES if d not in QUANTIZED]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    tensor = random_bits(shape, dtype, draw(st.integers(0, 99)))
    kind = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "parameter"]))
    if kind == "transposed" and tensor.ndim == 2:
        return tensor.t()
    if kind == "strided" and tensor.ndim:
        return tensor[::2]
    if kind == "expanded" and tensor.ndim:
        return tensor[:1].expand(3, *shape[1:]) if shape[0] else tensor
    return nn.Parameter(tensor, requires_grad=False) if kind == "parameter" else tensor


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5) | tensors()
KEYS = st.text(max_size=4) | st.integers(-9, 9) | st.tuples(st.integers(0, 3), st.text(max_size=2))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.covers("F38", "F39", "F40", "F41", "F44", "I5")
@settings(max_examples=150)
@given(VALUES, st.data())
def test_any_nested_value_comes_back(value, data):
    out = through(value)
    assert same_nested(out, value)
    live = {"value": data.draw(st.sampled_from([value, None, {"x": 1}]))}
    if live["value"] is value:
        saved = save({"t": {"value": value}})
        saved.load(registry(t=live))
        assert same_nested(live["value"], value)


def test_registry_refuses_what_it_cannot_keep():
    states = StateRegistry()
    states.add("a", {})
    for name, obj, match in [("a", {}, "already"), ("a/b", {}, "cannot be used"), ("", {}, "cannot be used"), ("x", 3, "cannot be taken")]:
        with pytest.raises(ConfigError, match=match):
            states.add(name, obj)
    with pytest.raises(ConfigError, match="only_trainable"):
        states.add("t", {}, only_trainable=True)
    with pytest.raises(ConfigError, match="kind"):
        states.add("m", {}, kind="module")

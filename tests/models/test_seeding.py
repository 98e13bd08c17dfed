"""Random numbers belong to names; and global random states are put back."""

import random

import numpy as np
import pytest
import torch

from pytest_modelprobe.models.seeding import (
    derive,
    forked_rng,
    randint,
    randn,
    seeded,
)


def draw_all():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()  # noqa: NPY002


def rng_states():
    numpy = [np.asarray(part).tolist() for part in np.random.get_state()]  # noqa: NPY002
    return torch.get_rng_state().tolist(), numpy, random.getstate()


# --- seeds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "name", "expected"),
    [
        (0, "x", 7919274910726248567),
        (7, "layer.0.weight", 8564779056923900045),
        (-1, "", 2513051583816688542),
        (2**70, "größe", 126011910541436081),
    ],
)
def test_derived_seeds_are_the_same_for_ever(seed, name, expected):
    assert derive(seed, name) == expected


def test_seeded_gives_the_same_numbers_and_puts_the_states_back():
    before = rng_states()
    with seeded(2**62 + 5):
        first = draw_all()
    assert rng_states() == before
    with seeded(2**62 + 5):
        assert draw_all() == first


def test_saving_the_states_does_not_initialize_cuda(monkeypatch):
    def never():
        raise AssertionError("CUDA would be initialized")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", never)
    with forked_rng():
        pass


def test_cuda_that_starts_later_gets_the_seed_from_before(monkeypatch):
    waiting = torch.cuda._lazy_seed_tracker
    generator = torch.Generator()

    def seed_at_first_use():
        for begin, _ in filter(None, waiting.get_calls()):
            begin()
        return generator.initial_seed()

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    with forked_rng():
        torch.default_generator.manual_seed(11)
        with seeded(22):
            assert seed_at_first_use() == 22
        assert seed_at_first_use() == 11


def test_cuda_that_is_in_use_is_seeded_at_once(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with seeded(22):
        pass
    assert seeds == [22]


def test_cuda_states_are_put_back_where_cuda_is_in_use(monkeypatch):
    states = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["a state"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", states.append)
    with forked_rng():
        pass
    assert states == [["a state"]]


# --- inputs -----------------------------------------------------------------------------------


def test_inputs_are_the_same_for_ever():
    x = randn((3,), seed=0, name="x", device="cpu")
    assert x.tolist() == pytest.approx([-0.012447, -0.095611, 0.569689], abs=1e-6)
    assert randint(0, 100, (5,), seed=0, name="ids", device="cpu").tolist() == [42, 75, 63, 96, 77]


def draw_inputs():
    x = randn((4, 2), seed=5, name="x", device="cpu")
    return x, randint(-3, 3, (4,), seed=5, name="ids", device="cpu")


def test_inputs_do_not_depend_on_the_global_state_nor_touch_it():
    torch.manual_seed(1)
    x, ids = draw_inputs()
    torch.manual_seed(2)
    before = rng_states()
    assert all(map(torch.equal, draw_inputs(), (x, ids)))
    assert rng_states() == before


def test_inputs_ignore_the_default_device():
    with torch.device("meta"):
        x, ids = draw_inputs()
    assert x.device.type == ids.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_randn_of_another_dtype(dtype):
    x = randn((4,), seed=0, name="x", device="cpu", dtype=dtype)
    assert x.dtype is dtype
    if not dtype.is_complex:
        assert torch.equal(x, randn((4,), seed=0, name="x", device="cpu").to(dtype))

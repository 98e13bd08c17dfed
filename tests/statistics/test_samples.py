"""Fingerprints of a batch: the sum of those of its samples, each with a hash of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pytest_modelprobe.record import estimated_change
from pytest_modelprobe.statistics import (
    SeenSamples,
    collect,
    merge,
    reduce,
    samples,
    samples_of,
)
from pytest_modelprobe.statistics.samples import K

from .test_fingerprint import draw
from .test_statistics import reduce_on_device


def fingerprint(tensor, samples, way=reduce):
    (one,) = collect([way(tensor, samples=samples)])
    return one.fingerprint


def hashes_of(*inputs):
    return samples_of(inputs).hashes((len(inputs[0]),))


SIZES = [(3, 1), (6, 3, 100), (40, 700), (2, 2**20 + 300)]


# --- the definition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("way", [reduce, reduce_on_device])
def test_the_fingerprint_of_a_batch_is_the_sum_of_those_of_its_samples(shape, way):
    x, given = draw(*shape), draw(shape[0], 9, seed=1)
    each = np.array([fingerprint(a, samples_of([b])) for a, b in zip(x.split(1), given.split(1), strict=True)])
    assert math.dist(fingerprint(x, samples_of([given]), way), each.sum(0)) < 1e-6 * x.norm().item()


@pytest.mark.parametrize("way", [reduce, reduce_on_device])
@pytest.mark.parametrize("kind", ["float", "int"])
def test_those_of_the_parts_of_a_batch_add_up_in_any_order(kind, way):
    shape = (8, 20_000)
    given = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(1))
    x = draw(*shape) if kind == "float" else (draw(*shape) * 1000).long()
    (whole,) = collect([way(x, samples=samples_of([given]))])
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
    parts = zip(x[order].split([3, 1, 4]), given[order].split([3, 1, 4]), strict=True)
    first, *others = (way(part, samples=samples_of([ids])) for part, ids in parts)
    (summed,) = collect([merge(merge(first, others[0]), others[1])])
    assert estimated_change(summed.fingerprint, whole.fingerprint) < 1e-6
    assert summed.digest == whole.digest


def test_a_value_without_the_batch_has_one_hash():
    samples = samples_of([draw(4, 3)])
    for shape in ((), (3,), (1, 4), (5, 4)):
        assert not samples.has_batch(shape)
        assert samples.hashes(shape).tolist() == samples.hashes_on(torch.device("cpu"), shape).tolist() == [0]


def test_the_digest_of_a_batch_knows_the_place_within_the_sample_and_the_sample():
    given = draw(3, 4)
    ids = torch.arange(3 * 20_000).view(3, 20_000)
    digests = {collect([reduce(ids, samples=samples_of([given]))])[0].digest}
    for sample, place in ((0, 0), (1, 16_383), (2, 16_384), (2, 19_999)):
        other = ids.clone()
        other[sample, place] += 1
        digests.add(collect([reduce(other, samples=samples_of([given]))])[0].digest)
    for other in (ids[[1, 0, 2]], ids.roll(2**14, 1)):
        digests.add(collect([reduce(other, samples=samples_of([given]))])[0].digest)
    assert len(digests) == 7


EQUAL_IN_PARTS = draw(3, 700)[[0, 1, 0, 2, 2, 0]]

# --- what a sample is known by ----------------------------------------------------------------------------------------


def test_samples_of_one_batch_have_different_hashes():
    ids, images, waves = torch.randint(0, 100, (64, 5)), draw(64, 1, 8, 8).relu(), draw(64, 3, dtype=torch.cfloat)
    for given in (draw(64, 8), ids, images, waves):
        assert len(set(hashes_of(given).tolist())) > 55  # those alike in all coarse projections share one


def test_the_first_argument_that_tells_samples_apart_counts_alone():
    x, y = draw(4, 6), draw(4, 9, seed=1)
    assert (hashes_of(x, y) == hashes_of(x)).all()
    assert (hashes_of(x, y + 1) == hashes_of(x)).all()
    assert (hashes_of(x + 1, y) != hashes_of(x)).all()


def test_each_argument_has_hashes_of_its_own():
    x, y, mask = draw(4, 6), draw(4, 9, seed=1), torch.ones(4, 3).long()
    samples = samples_of([x, torch.tensor(0.5), y, mask])
    assert samples.inputs[0] is None  # those of all values
    assert samples.inputs[1] is None  # it has no batch
    for place, alone in ((2, y), (3, mask)):
        own = samples.inputs[place]
        assert (own.hashes((4,)) == hashes_of(alone)).all()


ORDER = torch.tensor([5, 2, 0, 1, 4, 3])
ALIKE = {
    "labels": torch.tensor([3, 1, 3, 3, 1, 2]),
    "zeros": torch.zeros(6, 5),
    "some equal": draw(6, 5)[[0, 1, 0, 0, 1, 2]],
    "a mask": torch.ones(6, 5, dtype=torch.bool),
    "not finite": draw(6, 5)[[0, 1, 0, 0, 1, 2]].masked_fill(torch.arange(5) == 2, math.inf),
}


@pytest.mark.parametrize("first", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize(
    "second", [draw(6, 8, seed=3), draw(6, 8, seed=3)[[0, 1, 2, 2, 1, 3]]], ids=["unlike", "alike"]
)
def test_samples_with_one_first_input_are_told_apart_by_the_others_in_any_order(first, second):
    samples, reordered = (samples_of([first[order], second[order]]) for order in (torch.arange(6), ORDER))
    assert len(set(samples.hashes((6,)).tolist())) == 6
    y = torch.cat([first.flatten(1).double() if first.dim() > 1 else first[:, None].double(), second.double()], 1)
    y = y.nan_to_num(posinf=0.0)  # a value is made of both inputs, so that equal samples have equal parts of it
    assert fingerprint(y[ORDER], reordered) == pytest.approx(fingerprint(y, samples))
    assert samples.sum() == reordered.sum()


def test_in_a_forward_of_one_sample_every_value_belongs_to_it():
    samples = samples_of([torch.tensor(2.0), draw(1, 6), torch.arange(5)])
    for shape in ((), (3,), (1, 4), (2, 3, 3)):
        assert samples.has_batch(shape)
        assert samples.hashes(shape).tolist() == hashes_of(draw(1, 6)).tolist()
    assert [own is None for own in samples.inputs] == [False, True, False]


def test_rounding_leaves_the_hashes_of_floating_samples():
    for x in (draw(32, 64), draw(32, 3), draw(32, 5000).relu(), F.one_hot(torch.arange(32)).float()):
        assert (hashes_of(x) == hashes_of(x * (1 + 1e-7 * draw(*x.shape, seed=1)))).all()
        assert (hashes_of(x) == hashes_of(x.double())).all()


def test_equal_samples_are_numbered_and_do_not_add_up_to_more_than_they_are():
    for given in (torch.ones(64, 5), torch.zeros(64, 5).long()):
        y = torch.ones(64, 100)
        assert 0.4 < math.hypot(*fingerprint(y, samples_of([given]))) / y.norm().item() < 2


@pytest.mark.parametrize(
    "given",
    [EQUAL_IN_PARTS, EQUAL_IN_PARTS.double(), (100 * EQUAL_IN_PARTS).long()],
    ids=["float32", "float64", "int64"],
)
def test_equal_samples_of_microbatches_are_numbered_as_in_one_batch(given):
    seen, found = SeenSamples(), []
    for part in given.split(2):
        samples = samples_of([part], seen=seen)
        seen.add(samples)
        found.append(samples.hashes((len(part),)))
    np.testing.assert_array_equal(np.concatenate(found), hashes_of(given))


def test_inputs_that_cannot_be_read_have_no_batch():
    for inputs in ([], [torch.tensor(3.0)], [torch.ones(3, device="meta")], [torch.ones(0, 3)]):
        assert samples_of(inputs).hashes((3, 4)).tolist() == [0]


@pytest.mark.parametrize("given", [draw(6, 700), torch.arange(60).view(6, 10), torch.ones(6, 4)])
def test_every_device_gives_samples_the_same_hashes(given, monkeypatch):
    here, read = samples_of([given, ALIKE["not finite"]]), samples._elements_read
    monkeypatch.setattr(samples, "_elements_read", lambda x: torch.from_numpy(read(x)))
    there = samples_of([given, ALIKE["not finite"]])
    assert isinstance(there.keys, torch.Tensor)
    np.testing.assert_array_equal(there.keys, here.keys)
    for one, other in ((there, here), (there.inputs[1], here.inputs[1])):
        np.testing.assert_array_equal(one.hashes((6,)), other.hashes((6,)))


# --- how far off estimates are ----------------------------------------------------------------------------------------

GIVEN = draw(32, 12, 16, seed=7)
HIDDEN = GIVEN @ draw(16, 64, seed=8) / 4
FIRST = HIDDEN[:, 0]


def batch_norm(x, eps):
    return F.batch_norm(x, None, None, training=True, eps=eps)


CASES = {
    "the epsilon of a LayerNorm": (F.layer_norm(HIDDEN, (64,), eps=1e-3), F.layer_norm(HIDDEN, (64,))),
    "the epsilon of a BatchNorm": (batch_norm(FIRST, 1e-3), batch_norm(FIRST, 1e-5)),
    "a unit scaled": (torch.cat([HIDDEN[..., :1] * 1.01, HIDDEN[..., 1:]], -1), HIDDEN),
    "samples permuted": (HIDDEN[torch.randperm(32, generator=torch.Generator().manual_seed(1))], HIDDEN),
    "the mean of the batch subtracted more than once": (FIRST - FIRST.mean(0) * 1.5, FIRST - FIRST.mean(0)),
    "a softmax over the batch": (torch.softmax(FIRST * 1.01, 0), torch.softmax(FIRST, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_no_kind_of_change_is_missed(case):
    now, then = CASES[case]
    samples = samples_of([GIVEN])
    found = estimated_change(fingerprint(now, samples), fingerprint(then, samples), then.norm().item())
    assert 0.3 < found / ((now - then).norm() / then.norm()).item() < 1.6


# --- in a watch -------------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def step(watch, model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def test_an_evaluation_before_the_training_leaves_the_fingerprints_of_the_first_step(modelprobe):
    found = []
    for evaluations in (0, 2):
        model = net()
        watch = modelprobe.watch(model)
        for seed in range(evaluations):
            model.eval()(draw(4, 6, seed=seed))
        step(watch, model.train(), torch.optim.SGD(model.parameters(), 0.1), draw(4, 6, seed=9))
        values = [value for _, value in watch.first_step["0"].outputs]
        found.append([(value.forward.fingerprint, value.backward.fingerprint) for value in values])
        found[-1].append(watch.first_step["0"].parameters[0].gradient.fingerprint)
    assert found[0] == found[1]


EQUAL = draw(4, 6, seed=9)[[0, 1, 0, 2, 2, 3, 0, 2]]


@pytest.mark.parametrize("x", [draw(8, 6, seed=9), EQUAL, torch.ones(8, 6)], ids=["different", "some equal", "equal"])
def test_microbatches_add_up_to_the_batch(modelprobe, x):
    found = []
    for parts in (1, 2, 4):
        model = net()
        watch = modelprobe.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for part in x.chunk(parts):
            model(part).square().sum().backward()
        optimizer.step()
        ((_, value),) = watch.first_step["1"].outputs
        found.append((value.forward, value.backward))
    for several in found[1:]:
        for one, other in zip(found[0], several, strict=True):
            assert len(one.fingerprint) == K
            assert estimated_change(other.fingerprint, one.fingerprint) < 1e-6


def test_equal_samples_of_forwards_that_no_backward_pass_reached_are_numbered_alike(modelprobe):
    watch = modelprobe.watch(net())
    for _ in range(2):
        watch.model(EQUAL)
    assert watch.first["1"].output.forward.fingerprint == watch.last["1"].output.forward.fingerprint

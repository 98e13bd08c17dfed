import collections
import dataclasses
import enum
import functools
import types

import pytest
import torch

from pytest_modelprobe.models.flatten import flatten, flatten_call, map_tensors

Pair = collections.namedtuple("Pair", "left right")
x, y = torch.zeros(2), torch.ones(3)


@dataclasses.dataclass
class Data:
    logits: torch.Tensor
    hidden: list
    note: str = "n"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: torch.Tensor
    b: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "b", self.a)


class Attrs:
    """What attrs makes of a class, as far as it matters here."""

    __attrs_attrs__ = (types.SimpleNamespace(name="_state"),)

    def __init__(self, state):
        self._state = state


class Box(collections.UserDict):
    """A mapping whose constructor takes no items, like transformers' BatchEncoding."""

    def __init__(self, data=None, *, encoding=None):
        super().__init__(data)


class Slots:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


class Open:
    def __init__(self, a):
        self.a = a


class Rows:
    """An iterator with a tensor among its attributes, which is not what it gives out."""

    rows = torch.zeros(2)

    def __init__(self):
        self.left = x

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


class Kind(enum.IntEnum):
    ONE = 1


class Stack(list):
    pass


def paths(value):
    return [path for path, _ in flatten("output", value).tensors]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (x, ["output"]),
        ((x, [y]), ["output[0]", "output[1][0]"]),
        ({"a": x, "b c": y, 3: x}, ["output.a", "output['b c']", "output[3]"]),
        (Pair(x, (y,)), ["output.left", "output.right[0]"]),
        (Data(x, [y]), ["output.logits", "output.hidden[0]"]),
        (Attrs(x), ["output._state"]),
        (Box({"ids": x}), ["output.ids"]),
        (Stack([x]), ["output[0]"]),
        (torch.eye(2).max(0), ["output[0]", "output[1]"]),
        (torch.nn.Parameter(x), ["output"]),
        (None, []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_found_with_their_paths(value, expected):
    assert paths(value) == expected


def test_plain_values_are_exact_builtins():
    flat = flatten("v", [True, Kind.ONE, 2.5, "s", None, torch.float32, torch.device("cpu"), torch.channels_last])
    assert list(flat.plain.values()) == [True, 1, 2.5, "s", None, "torch.float32", "cpu", "torch.channels_last"]
    assert {type(value) for value in flat.plain.values()} == {bool, int, float, str, type(None)}
    assert flat.known


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, iter([x]), Rows(), lambda: x, functools.partial(len), Data, 1j, torch.nn.Linear(1, 1), Slots(x)],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_opened_is_told_by_path_and_type(value):
    flat = flatten("v", [x, value])
    assert not flat.known
    assert [path for path, _ in flat.tensors] == ["v[0]"]
    assert flat.opaque == {"v[1]": type(value).__qualname__}


def test_distributions_are_looked_into():
    normal = torch.distributions.Normal(x, x + 1)
    assert paths(torch.distributions.Categorical(logits=x)) == ["output.logits"]
    assert paths(torch.distributions.Independent(normal, 1)) == ["output.base_dist.loc", "output.base_dist.scale"]


def test_objects_are_looked_into_and_rebuilt():
    value = Open([x])
    ((path, tensor),) = flatten("v", [value]).tensors
    assert path == "v[0].a[0]"
    (rebuilt,) = map_tensors(lambda t: t + 1, [value])
    assert type(rebuilt) is type(value)
    assert torch.equal(flatten("", rebuilt).tensors[0][1], x + 1)
    assert flatten("v", [value]).tensors[0][1] is tensor
    assert not flatten("v", value).known


def test_what_an_object_works_with_is_passed_over():
    value = Open([x])
    value.model, value.kind, value.function, value.me = torch.nn.Linear(1, 1), Open, print, value
    flat = flatten("v", value)
    assert ([path for path, _ in flat.tensors], flat.opaque) == (["v.a[0]"], {})
    value.rows = iter([x])
    assert flatten("v", value).opaque == {"v.rows": "list_iterator"}
    assert flatten("v", Open([lambda: value])).opaque == {"v.a[0]": "function"}
    value.rows = lambda: value
    assert flatten("v", value).opaque == {"v": "Open"}


def test_objects_among_arguments_are_not_looked_into():
    flat = flatten_call((x, Open(x)), {})
    assert ([path for path, _ in flat.tensors], flat.opaque) == (["input[0]"], {"input[1]": "Open"})


def test_too_many_parts_and_a_container_that_holds_itself_are_told():
    assert len(flatten("v", [x] * 5000).tensors) == 5000
    assert flatten("v", [x] * 20_000).opaque == {"v": "list of too many parts"}
    value = [x]
    value.append(value)
    flat = flatten("v", value)
    assert flat.tensors[0][0] == "v[0]"
    assert not flat.known
    assert map_tensors(lambda t: y, value)[0] is y


def test_a_cache_of_transformers_is_looked_into_and_rebuilt():
    cache = pytest.importorskip("transformers").DynamicCache()
    assert flatten("v", cache).opaque == {}
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert paths(cache) == ["output.layers[0].keys", "output.layers[0].values"]
    map_tensors(torch.Tensor.clone, cache).update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert cache.get_seq_length() == 3


def test_arguments_are_named_by_position_or_keyword():
    def names(*args, **kwargs):
        return [path for path, _ in flatten_call(args, kwargs).tensors]

    assert names(x) == ["input"]
    assert names((x, y)) == ["input[0]", "input[1]"]
    assert names(x, y) == ["input[0]", "input[1]"]
    assert names(x, mask=y) == ["input", "mask"]
    assert names(input=x) == ["input"]


@pytest.mark.parametrize(
    "value",
    [
        [y, Pair(x, 3)],
        {"c": Data(x, [y]), "d": (x,)},
        torch.eye(2).max(0),
        Frozen(x),
        Attrs(x),
        Box({"ids": x}),
        Stack([x]),
        collections.defaultdict(list, a=x),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_replaced_in_a_container_of_the_same_kind(value):
    doubled = map_tensors(lambda t: 2 * t + 1, value)
    assert type(doubled) is type(value)
    assert paths(doubled) == paths(value)
    for (_, new), (_, old) in zip(flatten("", doubled).tensors, flatten("", value).tensors, strict=True):
        assert torch.equal(new, 2 * old + 1)


def test_a_model_output_of_transformers_is_rebuilt():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(y,))
    kept = map_tensors(lambda t: t + 1, value)
    assert type(kept) is type(value)
    assert torch.equal(kept.last_hidden_state, x + 1)
    assert torch.equal(kept["hidden_states"][0], y + 1)
    assert value.last_hidden_state is x


def test_what_is_shared_stays_shared():
    inner = [x]
    kept = map_tensors(torch.Tensor.clone, [inner, inner])
    assert kept[0] is kept[1]
    assert kept[0] is not inner

import inspect
from dataclasses import FrozenInstanceError, dataclass, field

import pytest

from pytest_modelprobe.record import Reading
from pytest_modelprobe.record.tensor_statistics import quickly_made


@quickly_made
@dataclass(frozen=True, slots=True, kw_only=True)
class Shelf:
    width: int
    boards: tuple[str, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)


def test_fields_have_their_defaults_and_each_instance_a_container_of_its_own():
    first, second = Shelf(width=1), Shelf(width=2, boards=("oak",))
    assert (first.boards, second.boards, second.width) == ((), ("oak",), 2)
    assert first.labels == {}
    assert first.labels is not second.labels


def test_a_field_without_a_default_is_needed():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'width'"):
        Shelf()


def test_a_field_cannot_be_set_later():
    with pytest.raises(FrozenInstanceError):
        Reading().tensors = 2


def test_the_signature_names_the_fields():
    assert list(inspect.signature(Shelf).parameters) == ["width", "boards", "labels"]

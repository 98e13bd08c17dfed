"""Renamed layers: rules that a user writes as ``rename=``, and records under other names.

A refactoring that renames a layer should compare as equal, so a record has to be read under other names. A name stands
in many places of a record: as the layer, as the owner of a tied parameter, in the address of the output that an input
is, and among the children in an isolated response. One walk over the record changes all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_modelprobe.exceptions import SelectionError

from .layer import ROOT, Call, IsolatedResponse, Layer, Parameter, Value, qualified, relative_name
from .record import NamesBefore, Record


def renamed(record: Record, names: Mapping[str, str]) -> Record:
    """Return the record with its layers under other names. Layers that ``names`` does not have keep theirs.

    >>> old = Record(model="Net", layers={"fc": Layer(name="fc", type="Linear")})
    >>> list(renamed(old, {"fc": "head"}).layers)
    ['head']
    """
    return record if all(old == new for old, new in names.items()) else _Names(names, {}).record(record)


def resolve_rename(actual: Record, expected: Record, rename: Mapping[str, str]) -> dict[str, str]:
    """Return expected name → actual name of the layers that a ``rename`` names, and of all inside them.

    Args:
        actual: The record with the names on the left.
        expected: The record with the names on the right.
        rename: Actual glob → expected glob. A ``*`` stands for the same text on the left and on the right.

    Raises:
        SelectionError: A glob matches nothing, or the two do not have the same wildcards.

    >>> new = Record(model="Net", layers={n: Layer(name=n, type="Linear") for n in ("blocks.0.fc", "blocks.1.fc")})
    >>> old = Record(model="Net", layers={n: Layer(name=n, type="Linear") for n in ("h.0.fc", "h.1.fc")})
    >>> resolve_rename(new, old, {"blocks.*": "h.*"})
    {'h.0.fc': 'blocks.0.fc', 'h.1.fc': 'blocks.1.fc'}
    """
    __tracebackhide__ = True
    found: dict[str, str] = {}
    for left, right in rename.items():
        wildcards = [re.findall(r"\*+", glob) for glob in (left, right)]
        if wildcards[0] != wildcards[1]:
            raise SelectionError(f"rename: {left!r} and {right!r} have not the same wildcards in the same order")
        pattern = _pattern(left)
        pairs = {_filled(right, m.groups()): name for name in actual.layers if (m := pattern.fullmatch(name))}
        if not pairs:
            raise SelectionError(f"rename: {left!r} matches no layer of the actual {actual.model}")
        known = {old: new for old, new in pairs.items() if old in expected.layers}
        if not known:
            raise SelectionError(
                f"rename: {right!r} matches no layer of the expected {expected.model}; "
                f"{left!r} makes it {', '.join(list(pairs)[:3])}"
            )
        taken = set(known.values())  # a later rule wins: two old names cannot become the same new one
        found = {old: new for old, new in found.items() if new not in taken} | known
    return found


def applicable_rename(rename: Mapping[str, str], expected: Record) -> dict[str, str]:
    """Return the rules of a ``rename`` that apply to a record, which may have the new names already.

    >>> new = Record(model="Net", layers={"head": Layer(name="head", type="Linear")})
    >>> applicable_rename({"head": "fc"}, new)
    {}
    """

    def found(glob: str) -> bool:
        return any(map(_pattern(glob).fullmatch, expected.layers))

    return {new: old for new, old in rename.items() if found(old) or not found(new)}


def old_name(name: str, rename: Mapping[str, str]) -> str:
    """Return the old name of a layer, or of a tensor in it. If several rules of a ``rename`` match, the last counts.

    >>> old_name("layers.3.fc.weight", {"layers": "encoder.layer", "layers.*.fc": "encoder.layer.*.dense"})
    'encoder.layer.3.dense.weight'
    """
    matches = ((_pattern(new).fullmatch(name), old) for new, old in reversed(list(rename.items())))
    return next((_filled(old, found.groups()) for found, old in matches if found), name)


def with_paths(record: Record, names: NamesBefore) -> Record:
    """Return a record, whose layers have their current names, with the current paths of inputs and outputs too.

    >>> call = Call(root="fc", root_training=False, index=0, arguments={"input[1]": 2})
    >>> old = Record(model="Net", layers={"fc": Layer(name="fc", type="Linear", calls=(call,))})
    >>> with_paths(old, NamesBefore(paths={"fc": {"scale": "input[1]"}})).layers["fc"].calls[0].arguments
    {'scale': 2}
    """
    if not names.paths:
        return record
    paths = {layer: {old: new for new, old in known.items()} for layer, known in names.paths.items()}
    return _Names({}, paths).record(record)


def infer_rename(actual: Record, expected: Record, names: Mapping[str, str]) -> dict[str, str]:
    """Return a ``rename`` that `resolve_rename` resolves to ``names``; an empty one if there is none.

    A message suggests it, so it is short: one rule for a layer and all inside it, and one for layers that differ only
    in their numbers.

    Args:
        actual: The record with the new names.
        expected: The record with the old ones.
        names: Expected name → actual name of the layers whose name changed.

    >>> old, new = (
    ...     Record(model="Net", layers={f"{at}{i}": Layer(name=f"{at}{i}", type="Linear") for i in range(3)})
    ...     for at in ("encoder.layer.", "layers.")
    ... )
    >>> infer_rename(new, old, {f"encoder.layer.{i}": f"layers.{i}" for i in range(3)})
    {'layers.*': 'encoder.layer.*'}
    """
    before = {new: old for old, new in names.items()}

    def follows_from_container(new: str) -> bool:
        container, _, own = new.rpartition(".")
        return container in before and before[new] == f"{before[container]}.{own}"

    one_by_one = {new: before[new] for new in before if not follows_from_container(new)}
    stars = [_folded_rule(*rule) for rule in one_by_one.items()]
    folded = dict(star if stars.count(star) > 1 else rule for star, rule in zip(stars, one_by_one.items(), strict=True))
    # A folded rule may match layers that were not renamed, so the result is tried before it is suggested.
    for found in (folded, one_by_one):
        outermost_first = dict(sorted(found.items(), key=lambda rule: rule[0].count(".")))
        with contextlib.suppress(SelectionError):
            if names.items() <= resolve_rename(actual, expected, outermost_first).items():
                return outermost_first
    return {}


def _folded_rule(new: str, old: str) -> tuple[str, str]:
    """Return a rule with a star for each number, if both names have the same numbers."""
    if numbers_in(new) != numbers_in(old):
        return new, old
    return _NUMBER.sub("*", new), _NUMBER.sub("*", old)


# A whole segment that is a number: the 3 in `layers.3`, and not the 1 in `fc1`.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def numbers_in(name: str) -> tuple[str, ...]:
    """Return the numbers among the segments of a name.

    >>> numbers_in("layers.3.experts.0.fc1")
    ('3', '0')
    """
    return tuple(_NUMBER.findall(name))


def _pattern(glob: str) -> re.Pattern[str]:
    parts = [re.escape(part) if i % 2 == 0 else _WILD[part] for i, part in enumerate(re.split(r"(\*\*|\*)", glob))]
    return re.compile("".join(parts) + r"(\..*)?")  # the last group has what is inside the layer


_WILD = {"*": r"([^.]*)", "**": r"(.*)"}


def _filled(glob: str, groups: Sequence[str | None]) -> str:
    *wild, below = groups
    values = iter(wild)
    return re.sub(r"\*\*|\*", lambda _: next(values) or "", glob) + (below or "")


# --- a record under other names -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of layers, and paths of inputs and outputs, each before → now. Paths are by the layer's name before."""

    layers: Mapping[str, str]
    paths: Mapping[str, Mapping[str, str]]

    def record(self, one: Record) -> Record:
        """Return a record under its current names."""
        layers = map(self._layer, one.layers.values())
        return dataclasses.replace(one, layers={layer.name: layer for layer in layers})

    def _name(self, layer: str) -> str:
        return self.layers.get(layer, layer)

    def _path(self, layer: str, path: str) -> str:
        return self.paths.get(layer, {}).get(path, path)

    def _address(self, address: str) -> str:
        """Return the current address of a value, such as ``blocks.0.fc (call 2) output``."""
        where, space, path = address.rpartition(" ")
        layer, blank, number = where.partition(" ")
        return self._name(layer) + blank + number + space + self._path(layer, path)

    def _place(self, place: str, layer: str) -> str:
        """Return the current place in a layer's code: its own, ``output``, or a child's, ``attn (call 2) input``."""
        where, space, path = place.rpartition(" ")
        if not space:
            return self._path(layer, path)
        child, blank, number = where.partition(" ")
        full = qualified(layer, child)
        name = relative_name(self.layers[full], self._name(layer)) if full in self.layers else child
        return name + blank + number + space + self._path(full, path)

    def _layer(self, one: Layer) -> Layer:
        return dataclasses.replace(
            one,
            name=self._name(one.name),
            parameters=tuple(map(self._parameter, one.parameters)),
            buffers=tuple(map(self._parameter, one.buffers)),
            calls=tuple(self._call(call, one.name) for call in one.calls),
        )

    def _parameter(self, one: Parameter) -> Parameter:
        if one.tied_to is None:
            return one
        layer, _, name = one.tied_to.rpartition(".")
        return dataclasses.replace(one, tied_to=qualified(self._name(layer or ROOT), name))

    def _call(self, one: Call, layer: str) -> Call:
        return dataclasses.replace(
            one,
            root=self._name(one.root),
            inputs=tuple(self._value(value, layer) for value in one.inputs),
            outputs=tuple(self._value(value, layer) for value in one.outputs),
            arguments={self._path(layer, path): value for path, value in one.arguments.items()},
            response=None if one.response is None else self._response(one.response, layer),
        )

    def _value(self, one: Value, layer: str) -> Value:
        source = None if one.source is None else self._address(one.source)
        path = self._path(layer, one.path)
        return one if (path, source) == (one.path, one.source) else dataclasses.replace(one, path=path, source=source)

    def _response(self, one: IsolatedResponse, layer: str) -> IsolatedResponse:
        def place(where: str) -> str:
            return self._place(where, layer)

        return dataclasses.replace(
            one,
            handed=tuple(
                dataclasses.replace(h, where=place(h.where), passed=None if h.passed is None else place(h.passed))
                for h in one.handed
            ),
            recipes={place(name): recipe for name, recipe in one.recipes.items()},
            without_gradient=tuple(map(place, one.without_gradient)),
        )

"""Renamed layers: rules that a user writes as ``rename=``, and records under other names."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence

from pytest_modelprobe.exceptions import SelectionError

from .calls import Call, IsolatedResponse, Value
from .layer import Layer, Parameter
from .naming import ROOT, qualified
from .record import NamesBefore, Record


def renamed(record: Record, names: Mapping[str, str]) -> Record:
    """Return the record with its layers under other names; those that ``names`` does not have keep theirs.

    >>> old = Record(model="Net", layers={"fc": Layer(name="fc", type="Linear")})
    >>> list(renamed(old, {"fc": "head"}).layers)
    ['head']
    """
    if all(old == new for old, new in names.items()):
        return record
    layers = (_renamed_layer(layer, names) for layer in record.layers.values())
    return dataclasses.replace(record, layers={layer.name: layer for layer in layers})


def resolve_rename(actual: Record, expected: Record, rename: Mapping[str, str]) -> dict[str, str]:
    """Return expected name → actual name of the layers that a ``rename`` names, and of all inside them.

    Args:
        actual: The record with the names on the left.
        expected: The record with the names on the right.
        rename: Actual glob → expected glob; what a ``*`` stands for on the left it stands for on the right.

    Raises:
        SelectionError: A glob matches nothing, or the two have not the same wildcards.

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
        taken = set(known.values())
        found = {old: new for old, new in found.items() if new not in taken} | known
    return found


def applicable_rename(rename: Mapping[str, str], expected: Record) -> dict[str, str]:
    """Return the rules of a ``rename`` that apply to a record: none where it has the new names already.

    >>> new = Record(model="Net", layers={"head": Layer(name="head", type="Linear")})
    >>> applicable_rename({"head": "fc"}, new)
    {}
    """

    def found(glob: str) -> bool:
        return any(map(_pattern(glob).fullmatch, expected.layers))

    return {new: old for new, old in rename.items() if found(old) or not found(new)}


def old_name(name: str, rename: Mapping[str, str]) -> str:
    """Return the old name of a layer, or of a tensor in it; of several rules of a ``rename`` the last one counts.

    >>> old_name("layers.3.fc.weight", {"layers": "encoder.layer", "layers.*.fc": "encoder.layer.*.dense"})
    'encoder.layer.3.dense.weight'
    """
    matches = ((_pattern(new).fullmatch(name), old) for new, old in reversed(list(rename.items())))
    return next((_filled(old, found.groups()) for found, old in matches if found), name)


def with_paths(record: Record, names: NamesBefore) -> Record:
    """Return a record whose layers have their current names, with the current paths of what these take and give.

    >>> call = Call(root="fc", root_training=False, index=0, arguments={"input[1]": 2})
    >>> old = Record(model="Net", layers={"fc": Layer(name="fc", type="Linear", calls=(call,))})
    >>> with_paths(old, NamesBefore(paths={"fc": {"scale": "input[1]"}})).layers["fc"].calls[0].arguments
    {'scale': 2}
    """
    if not names.paths:
        return record
    paths = {layer: {old: new for new, old in known.items()} for layer, known in names.paths.items()}

    def moved(address: str, layer: str) -> str:
        """Return the address of a value of the layer itself, ``output``, or of one inside, ``attn (call 2) mask``."""
        what, space, path = address.rpartition(" ")
        own = paths.get(qualified(layer, what.partition(" ")[0]) if what else layer, {})
        return what + space + own.get(path, path)

    def value(one: Value, layer: str) -> Value:
        source = None if one.source is None else moved(one.source, ROOT)
        return dataclasses.replace(one, path=paths.get(layer, {}).get(one.path, one.path), source=source)

    def response(one: IsolatedResponse, layer: str) -> IsolatedResponse:
        handed = (
            dataclasses.replace(
                h,
                where=moved(h.where, layer),
                passed=h.passed if h.passed is None or h.passed.startswith("=") else moved(h.passed, layer),
            )
            for h in one.handed
        )
        return dataclasses.replace(
            one,
            handed=tuple(handed),
            recipes={moved(name, layer): recipe for name, recipe in one.recipes.items()},
            without_gradient=tuple(moved(name, layer) for name in one.without_gradient),
        )

    def call(one: Call, layer: str) -> Call:
        own = paths.get(layer, {})
        return dataclasses.replace(
            one,
            inputs=tuple(value(v, layer) for v in one.inputs),
            outputs=tuple(value(v, layer) for v in one.outputs),
            arguments={own.get(path, path): v for path, v in one.arguments.items()},
            response=None if one.response is None else response(one.response, layer),
        )

    layers = {
        name: dataclasses.replace(layer, calls=tuple(call(one, name) for one in layer.calls))
        for name, layer in record.layers.items()
    }
    return dataclasses.replace(record, layers=layers)


def infer_rename(actual: Record, expected: Record, names: Mapping[str, str]) -> dict[str, str]:
    """Return a ``rename`` that `resolve_rename` resolves to ``names``: one rule for a layer and all inside it.

    Args:
        actual: The record with the new names.
        expected: The record with the old ones.
        names: Expected name → actual name, of the layers that have another one.

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
    for found in (folded, one_by_one):
        outermost_first = dict(sorted(found.items(), key=lambda rule: rule[0].count(".")))
        with contextlib.suppress(SelectionError):
            if names.items() <= resolve_rename(actual, expected, outermost_first).items():
                return outermost_first
    return {}


def _folded_rule(new: str, old: str) -> tuple[str, str]:
    """Return a rule with a star for each number, where both have the same ones."""
    if numbers_in(new) != numbers_in(old):
        return new, old
    return _NUMBER.sub("*", new), _NUMBER.sub("*", old)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def numbers_in(name: str) -> tuple[str, ...]:
    """Return the numbers among the segments of a name.

    >>> numbers_in("layers.3.experts.0.fc1")
    ('3', '0')
    """
    return tuple(_NUMBER.findall(name))


def _pattern(glob: str) -> re.Pattern[str]:
    parts = [re.escape(part) if i % 2 == 0 else _WILD[part] for i, part in enumerate(re.split(r"(\*\*|\*)", glob))]
    return re.compile("".join(parts) + r"(\..*)?")


_WILD = {"*": r"([^.]*)", "**": r"(.*)"}


def _filled(glob: str, groups: Sequence[str | None]) -> str:
    *wild, below = groups
    values = iter(wild)
    return re.sub(r"\*\*|\*", lambda _: next(values) or "", glob) + (below or "")


# --- trees --------------------------------------------------------------------------------------------------------


def _renamed_layer(layer: Layer, names: Mapping[str, str]) -> Layer:
    return dataclasses.replace(
        layer,
        name=names.get(layer.name, layer.name),
        parameters=tuple(_renamed_parameter(p, names) for p in layer.parameters),
        buffers=tuple(_renamed_parameter(p, names) for p in layer.buffers),
        calls=tuple(_renamed_call(call, layer.name, names) for call in layer.calls),
    )


def _renamed_parameter(parameter: Parameter, names: Mapping[str, str]) -> Parameter:
    if parameter.tied_to is None:
        return parameter
    layer, _, name = parameter.tied_to.rpartition(".")
    layer = layer or ROOT
    return dataclasses.replace(parameter, tied_to=qualified(names.get(layer, layer), name))


def _renamed_call(call: Call, layer: str, names: Mapping[str, str]) -> Call:
    return dataclasses.replace(
        call,
        root=names.get(call.root, call.root),
        inputs=tuple(_renamed_value(value, names) for value in call.inputs),
        response=None if call.response is None else _renamed_response(call.response, layer, names),
    )


def _renamed_value(value: Value, names: Mapping[str, str]) -> Value:
    return value if value.source is None else dataclasses.replace(value, source=_readdressed(value.source, names))


def _readdressed(address: str, names: Mapping[str, str]) -> str:
    layer, space, rest = address.partition(" ")
    return names.get(layer, layer) + space + rest


def _renamed_response(response: IsolatedResponse, layer: str, names: Mapping[str, str]) -> IsolatedResponse:
    """Rename the children, whose names are relative to the layer."""

    def inside(address: str) -> str:
        child, space, rest = address.partition(" ")
        new = names.get(qualified(layer, child)) if space else None  # else it is the call's own: `output`, `weight`
        if new is None:
            return address
        container = names.get(layer, layer)
        return new.removeprefix("" if container == ROOT else f"{container}.") + space + rest

    handed = tuple(
        dataclasses.replace(h, where=inside(h.where), passed=None if h.passed is None else inside(h.passed))
        for h in response.handed
    )
    return dataclasses.replace(
        response,
        handed=handed,
        recipes={inside(name): recipe for name, recipe in response.recipes.items()},
        without_gradient=tuple(map(inside, response.without_gradient)),
    )

"""A diagnosis as text: the first line of a failure, the table of causes, the counts.

The first line stands alone, because that is what a terminal and a list of failures show: it names the layer that
changed, by how much, and how many other causes there are. Equal causes in repeated layers are said once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_modelprobe.record import (
    AS_THEY_ARRIVED,
    NOT_DEFAULT,
    RESET,
    ROOT,
    Plain,
    Record,
    containers,
    is_narrow,
    label_of,
    qualified,
)
from pytest_modelprobe.text import Cell, collapsed, count, differing_part, listed, number, pattern, printable, table

from .diagnosis.causes import ABSORBED, GRADIENTS, NO_EFFECT, Cause, Diagnosis
from .tolerance import Difference


def first_line(diagnosis: Diagnosis) -> str:
    """Return the first line of a failure: layer, cause and effect, and the number of causes.

    >>> from pytest_modelprobe.comparison import compare
    >>> from pytest_modelprobe.comparison import diagnose
    >>> from pytest_modelprobe.record import Layer, Record
    >>> old, new = (
    ...     Record(model="Net", layers={"norm": Layer(name="norm", type="LayerNorm", attributes={"eps": eps})})
    ...     for eps in (1e-5, 1e-6)
    ... )
    >>> first_line(diagnose(compare(new, old)))
    'norm.eps 1e-05 → 1e-06; 1 cause'
    """
    if diagnosis.same and diagnosis.notes:
        places = _places(grouped(diagnosis.notes), diagnosis)
        return printable(f"same function; written otherwise in {places}")
    sure = bool(diagnosis.causes) and not _only_possible_moved_it(diagnosis)
    found = grouped(diagnosis.causes if sure else diagnosis.possible)
    within = f" within {percent(diagnosis.within)}" if diagnosis.within else ""
    unchanged = f"output unchanged{within}; " if diagnosis.unchanged else ""
    if unchanged and found and all(cause.change is None and cause.kind not in _OF_STEP for cause, _ in found):
        what = "code" if all(cause.changes_code and not cause.is_call_count for cause, _ in found) else "structure"
        return printable(f"{unchanged}{what} differs in {_places(found, diagnosis)}")
    if not found:
        worst = max(diagnosis.comparison.differences, key=lambda d: d.change or 0.0, default=None)
        if worst is None:
            renamed = diagnosis.comparison.renamed
            tops = {old: new for old, new in renamed.items() if old.rpartition(".")[0] not in renamed}
            names = listed([f"{label_of(old)} is called {new}" for old, new in tops.items()], most=3)
            return printable(names or "nothing changed")
        moved = f"{_label(worst.layer, diagnosis)} {worst.what or worst.kind} changed{by(worst.change, worst.sizes)}"
        return printable(f"{moved}; cannot tell why: {diagnosis.unknown}")
    first, times = found[0]
    repeated = f" x{times}" if times > 1 else ""
    counts = [count(len(found), "cause" if sure else "possible cause")]
    if diagnosis.causes and not sure:
        counts.append(f"{count(len(grouped(diagnosis.causes)), 'other')} without a known effect")
    if diagnosis.moved:
        counts.append(f"{count(len(diagnosis.moved), 'layer')} after {'it' if len(found) == 1 else 'them'} moved")
    effect = _effect(first)
    given = first.kind in ("input", "seed")  # the rest may follow from it
    sized = not given and any(cause.is_measured and not cause.is_generated for cause in diagnosis.causes)
    if (first.change is None or first.is_generated) and not sized and diagnosis.output is not None:
        alone = len(found) == 1 or sum(_may_move(cause) for cause, _ in found) == 1
        credited = alone and not first.is_generated
        effect = f"{':' if credited else ';'} the model's output changed{by(diagnosis.output)}"
    shown = cause_text(first, _label(first.layer, diagnosis))
    return printable(f"{unchanged}{'' if sure else 'possibly '}{shown}{repeated}{effect}; {', '.join(counts)}")


def _may_move(cause: Cause) -> bool:
    """Whether a cause without a size of its own may be what moved the output."""
    named = cause.what in ("path", "renamed", "training") or cause.what.endswith(" requires_grad")
    return cause.change is None and not named and not {ABSORBED, NO_EFFECT} & {*cause.hints}


def _only_possible_moved_it(diagnosis: Diagnosis) -> bool:
    """Whether the output changed, and only possible causes have a known effect."""
    # A mask or positions that differ in the run too have an effect, which has no size.
    seen = (one.change is not None or (one.is_generated and one.evidence != "isolated") for one in diagnosis.causes)
    if not diagnosis.output or any(seen):
        return False
    # A missing mask changes the output of a layer, also one of integers.
    unmasked = any(cause.is_call_change and "mask" in cause.what for cause in diagnosis.causes)
    has_effect = (c.change is not None or c.is_generated for c in diagnosis.possible if not c.is_consequence)
    return not unmasked and any(has_effect)


def _places(found: Sequence[tuple[Cause, int]], diagnosis: Diagnosis) -> str:
    """Return the number of places, and the first three."""
    first = [_repeated(cause_text(cause, _label(cause.layer, diagnosis)), times) for cause, times in found[:3]]
    more = ["..."] if len(found) > len(first) else []
    return f"{count(sum(times for _, times in found), 'place')}: {'; '.join(first + more)}"


def _repeated(text: str, times: int) -> str:
    return f"{text} x{times}" if times > 1 else text


def _label(layer: str, diagnosis: Diagnosis) -> str:
    """Return the label of a layer of either record, or of the layers that a pattern matches."""
    records = (diagnosis.comparison.actual, diagnosis.comparison.expected)
    return "layers '*'" if layer == "*" else next((r[layer].label for r in records if layer in r.layers), layer)


def text(diagnosis: Diagnosis, next_steps: Sequence[str] = ()) -> str:
    """Return the text of a failure: the first line, the tables of causes, the counts, the next steps."""
    parts = [first_line(diagnosis)]
    for title, causes in (("", diagnosis.causes), (_POSSIBLE, diagnosis.possible)):
        if causes:
            parts.append("\n".join([title] * bool(title) + table(CAUSE_COLUMNS, cause_rows(causes))))
    counts = []
    if diagnosis.moved:
        counts.append(f"Moved after that: {_names(diagnosis.moved)}.")
    if diagnosis.not_judged:
        counts.append(f"Not judged, as what came in had changed: {_names(diagnosis.not_judged)}.")
    if diagnosis.unknown:
        counts.append(f"The cause cannot be told: {diagnosis.unknown}.")
    if diagnosis.redrawn:
        counts.append(_REDRAWN)
    if diagnosis.unchanged and any(c.kind == "computation" and c.change is not None for c in diagnosis.causes):
        counts.append(_ROUNDED if is_narrow(diagnosis.comparison.expected) else _HIDDEN)
    counts += not_compared_sentence(diagnosis.comparison.unknown)
    if not diagnosis.same:  # else the first line says so
        counts += noted_calls(diagnosis.notes)
    notes = dict.fromkeys((*diagnosis.comparison.actual.notes, *diagnosis.comparison.expected.notes))
    counts += [f"{n[0].upper()}{n[1:]}." for n in notes if n.startswith(("no layer was", "no noise was"))]
    parts += ["\n".join(map(printable, counts))] if counts else []
    parts += [printable(step) for step in next_steps]
    return "\n\n".join(parts)


def not_compared_sentence(values: int) -> list[str]:
    """Return one sentence on values that were not compared, if there are some.

    >>> not_compared_sentence(2), not_compared_sentence(0)
    (['2 values could not be compared: no numbers of them repeat, or the inputs are others.'], [])
    """
    those = "it" if values == 1 else "them"
    said = f"{count(values, 'value')} could not be compared: no numbers of {those} repeat, or the inputs are others."
    return [said] if values else []


def noted_calls(notes: Iterable[Cause]) -> list[str]:
    """Return one sentence on what is written otherwise, which fails no test by itself.

    >>> noted_calls(
    ...     Cause(kind="architecture", layer=f"{i}.attn", what="path", expected="input[1]", actual="mask")
    ...     for i in range(6)
    ... )
    ['Written otherwise: input[1] renamed to mask in *.attn x6.']
    """
    layers: dict[str, list[str]] = {}
    for note in notes:
        said = cause_text(note)
        bare = said.removeprefix(f"{note.layer}: ")
        layers.setdefault(bare, []).extend([note.layer] * (bare != said))
    told = [f"{said} in {listed(collapsed(names))}" if names else said for said, names in layers.items()]
    return [f"{_NOTES}: {listed(told, most=8)}."] if told else []


_OF_STEP = ("gradient", "optimizer", "update")
"""Kinds of causes that change the step of training and not the output."""

CAUSE_COLUMNS = ("cause", "class", "changed by", "x noise", "seen", "looks like")


def cause_rows(causes: Iterable[Cause]) -> list[list[Cell]]:
    """Return the cells of `CAUSE_COLUMNS`, equal causes of repeated layers in one row."""
    return [
        [
            _repeated(cause_text(cause), times),
            cause.kind,
            _changed_by(cause),
            _times_noise(cause) or "-",
            _SEEN[cause.evidence],
            "; ".join(cause.hints) or "-",
        ]
        for cause, times in grouped(causes)
    ]


def cause_text(cause: Cause, label: str | None = None) -> str:
    """Return a cause in a few words, its layer first.

    Args:
        cause: The cause.
        label: The label of the layer in a sentence; None: its name, as in a table.

    >>> cause_text(Cause(kind="computation", layer="blocks.2", what="between norm1 and attn"))
    'blocks.2: own code changed between norm1 and attn'
    >>> cause_text(Cause(kind="weights", layer="fc1", what="weight, bias", change=0.0008))
    'fc1: weights changed by 0.08 % (weight, bias)'
    >>> cause_text(Cause(kind="architecture", layer="act", what="type", actual="GELU", expected="ReLU"))
    'act: ReLU → GELU'
    """
    layer, what = cause.layer, cause.what
    now, then = _value_text(cause.actual, cause.expected), _value_text(cause.expected, cause.actual)
    arrow = f"{then} → {now}"
    label = label or layer
    if cause.kind == "seed":
        return f"seed {arrow}"
    if cause.kind == "input":
        if cause.differences and cause.differences[0].kind in ("loss", "forwards", "argument", "interface"):
            return f"{what} {arrow}"
        return f"{what or 'input'} changed{by(cause.change, cause.sizes)}"
    if cause.kind == "architecture":
        return _architecture(cause, label, arrow)
    if cause.kind == "attribute":
        return f"{qualified(layer, what)} {arrow}"
    if cause.is_retraining:
        return f"all weights changed{by(cause.change, cause.sizes)} ({what.removeprefix('all ')})"
    if cause.kind in ("weights", "buffers"):
        return f"{label}: {cause.kind} changed{by(cause.change, cause.sizes)} ({what})"
    if cause.kind == "gradient":
        return _gradient(cause, label)
    if cause.kind == "optimizer":
        if cause.what == GRADIENTS:
            words = {AS_THEY_ARRIVED: "applied as they arrived", RESET: "reset before the step"}
            sides = map(_value_text, (cause.actual, cause.expected))
            now, then = (words.get(side, side.replace("others by", "replaced for")) for side in sides)
            return f"gradients {now}, not {then}"
        if cause.what.endswith(" group"):
            return f"{label}: {cause.what} of the optimizer {arrow}"
        return f"{cause.what} {arrow}"
    if cause.kind == "update":
        manner = cause.hints[0] if cause.hints else f"changed{by(cause.change, cause.sizes)}"
        return f"updates of {what} {manner}" if layer == ROOT else f"{label}: updates {manner} ({what})"
    return _computation(cause, label)


def _architecture(cause: Cause, label: str, arrow: str) -> str:
    layer, what = cause.layer, cause.what
    if what == "added":
        return f"{label} added: {', '.join((_value_text(cause.actual), *cause.hints))}"
    if what == "removed":
        return f"{label} removed: {', '.join(cause.hints) or f'it was {_value_text(cause.expected)}'}"
    if what == "path":
        if cause.actual is None or cause.expected is None:
            return f"{label}: {cause.actual or cause.expected} {'removed' if cause.actual is None else 'added'}"
        return f"{label}: {cause.expected} renamed to {cause.actual}"
    if what == "renamed":
        return f"{label_of(str(cause.expected))} renamed to {label}"
    if what == "type":
        return f"{label}: {arrow}"
    name, _, aspect = what.partition(" ")
    if aspect in ("added", "removed"):
        value = cause.actual if aspect == "added" else cause.expected
        return f"{qualified(layer, name)} {aspect}: {_value_text(value)}"
    return f"{qualified(layer, name)}{f' {aspect}' if aspect else ''} {arrow}"


def _computation(cause: Cause, label: str) -> str:
    own, what = f"{label}: own code", cause.what
    now, then = _value_text(cause.actual, cause.expected), _value_text(cause.expected, cause.actual)
    first = cause.differences[0] if cause.differences else None
    if cause.is_generated:
        return f"{label}: builds another {what}"
    if first is not None and cause.is_call_change:
        return f"{own} {_handed(first)}"
    if cause.is_call_count and what.startswith("calls of "):
        child = what.removeprefix("calls of ")
        if not cause.actual:
            return f"{own} no longer calls {child}"
        return f"{own} calls {child} " + (f"{now} time{'s' * (now != '1')}, not {then}" if cause.expected else "now")
    if first is None or cause.evidence != "recorded":
        return f"{own} changed {what}".rstrip()
    if first.kind == "interface" and what == first.what:
        return f"{own} gives out {'' if what == 'output' else f'{what} as '}{now}, not {then}"
    if first.kind == "source":
        return f"{own} feeds {now} to {what.removesuffix(' source')}, not {then}"
    if first.kind in ("input added", "input removed"):
        return f"{own} {'gives' if first.kind == 'input added' else 'no longer gives'} {what}"
    return f"{own} gives {what} {now}, not {then}"


def _handed(difference: Difference) -> str:
    """Return how the code calls a child now: ``no longer gives attn cache_position``."""
    child, _, path = difference.what.rpartition(" ")
    actual, expected = (str(side).removeprefix("=") for side in (difference.actual, difference.expected))
    if difference.actual is not None and difference.expected is not None:
        return f"gives {child} {path} {actual.removesuffix(NOT_DEFAULT)}, not {expected.removesuffix(NOT_DEFAULT)}"
    came = difference.expected is None
    if path in ("input", "input[0]"):
        return f"calls {child}" if came else f"no longer calls {child}"
    value = f" {actual}" if came and str(difference.actual).startswith("=") else ""
    return f"gives {child} {path}{value}" if came else f"no longer gives {child} {path}"


def _gradient(cause: Cause, label: str) -> str:
    if cause.gradient == "of loss":
        arrives = "another gradient arrives at the output" if cause.what == "the loss" else cause.what
        return f"the loss changed: {arrives}"
    if cause.gradient == "lost":
        return f"{label}: no gradient any more for {cause.what}"
    if cause.gradient == "switched":
        child = cause.what.removesuffix(" grad_enabled")
        return f"{label}: own code calls {child} with gradients {'on' if cause.actual else 'off'}"
    if cause.gradient in ("updated", "not updated"):
        now = cause.gradient == "updated"
        return f"{label}: the optimizer {'updates' if now else 'no longer updates'} {cause.what}{' now' * now}"
    if cause.gradient == "of value":
        return f"{label}: gradient of {cause.what} changed"
    return f"{label}: gradient {cause.gradient or 'changed'} {cause.what or 'in its own code'}"


def percent(change: float | None) -> str:
    """Return a relative change in percent.

    It is infinite if the expected value was zero, or if the number of non-finite elements changed.

    >>> percent(0.0013), percent(2.5e-7), percent(3.2), percent(math.inf), percent(math.nan), percent(None)
    ('0.13 %', '2.5e-05 %', '320 %', '∞ %', 'not known', '-')
    """
    if change is None:
        return "-"
    if math.isinf(change):
        return "∞ %"
    if math.isnan(change):
        return "not known"
    return f"{100 * change:{'.2g' if change < 0.995 else ',.0f' if change < 1e4 else '.1e'}} %"


def grouped(causes: Iterable[Cause]) -> list[tuple[Cause, int]]:
    """Return causes, equal ones of repeated layers as the one with the largest change, and their number.

    >>> eps = [Cause(kind="attribute", layer=f"blocks.{i}.norm", what="eps", actual=1, expected=2) for i in range(6)]
    >>> [(cause.layer, n) for cause, n in grouped(eps)]
    [('blocks.*.norm', 6)]
    """
    groups: dict[tuple[object, ...], list[Cause]] = {}
    for cause in causes:
        values = (str(cause.actual), str(cause.expected))
        shown = map(pattern, values) if cause.what == "renamed" else values
        groups.setdefault((cause.kind, pattern(cause.layer), cause.what, *shown), []).append(cause)
    found = []
    for same in groups.values():
        worst = max(same, key=lambda cause: cause.change or 0.0)
        if len(same) > 1:
            was = pattern(str(worst.expected)) if worst.what == "renamed" else worst.expected
            worst = dataclasses.replace(worst, layer=pattern(worst.layer), expected=was)
        found.append((worst, len(same)))
    return found


def known_change(cause: Cause) -> float | None:
    """Return the relative change of what a cause changed; None where that has another shape."""
    return None if cause.effect == "shape" else cause.change


def _effect(cause: Cause) -> str:
    if cause.effect == "shape":
        return ": its output has another shape"
    if cause.kind == "optimizer":
        return f": {listed(cause.hints)}" if cause.hints else ""
    if cause.kind == "update":
        return ""
    if cause.kind in ("weights", "buffers", "input", "seed") or cause.change is None or cause.is_generated:
        return ""
    what = f"{'its ' if cause.effect == 'output' else ''}{cause.effect} changed " if cause.effect else ""
    if math.isinf(cause.change):
        told = ", ".join(filter(None, (what.strip(), cause.sizes, *cause.hints)))
        return f": {told}" if told else ""
    noise = _times_noise(cause)
    times = f", {noise} x its noise" if noise else ""
    return f": {what}by {percent(cause.change)}{times}"


def _times_noise(cause: Cause) -> str:
    if not cause.noise or cause.change is None or math.isinf(cause.change):
        return ""
    return f"{float(f'{cause.change / cause.noise:.2g}'):,.10g}"


def _changed_by(cause: Cause) -> str:
    change = known_change(cause)
    return cause.sizes or "-" if change == math.inf else percent(change)


def by(change: float | None, sizes: str = "") -> str:
    """Return by how much something changed, for a sentence; both sizes where the change has no percentage.

    >>> by(0.03), by(math.inf, "rms 0 → 0.31"), by(math.inf), by(None)
    (' by 3 %', ', rms 0 → 0.31', '', '')
    """
    if change is None or math.isinf(change):
        return f", {sizes}" if sizes and change else ""
    return f" by {percent(change)}"


def moved_by(differences: Sequence[Difference], up_to: str = "") -> str:
    """Return how far values moved at most: ``moved by 3 %``."""
    worst = max(differences, key=lambda difference: difference.change or 0.0)
    return f"moved{by(worst.change, worst.sizes)}".replace(" by ", f" by {up_to}")


def _value_text(value: Plain, other: Plain = None) -> str:
    """Return a value; of a long one the part in which it differs from the other."""
    shown, beside = ("none" if one is None else str(one) for one in (value, other))
    return differing_part(shown, beside)


def _names(names: Sequence[str]) -> str:
    return listed(collapsed(names), most=8)


_HIDDEN = "The run does not show it: what that code computes is multiplied by zero, or not used."
_ROUNDED = "Called alone in float32. The run does not show it: it is less than half precision can show, or not used."
_REDRAWN = (
    "All random weights are other ones, and every layer's code answers the same, alone: perhaps the model was built "
    "outside the seed. "
    "modelprobe.build(Net) gives the same weights in every run."
)

_POSSIBLE = "Possible (an input is unknown, or only one of two kinds of evidence shows it):"

_NOTES = "Written otherwise"

_SEEN = {
    "recorded": "in the record",
    "isolated": "in its code alone",
    "propagation": "in the run",
    "both": "alone and in the run",
}


# --- differences as rows of a table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One change of one layer, or the same change of several."""

    layer: str
    what: str
    now: str
    was: str
    layers: tuple[str, ...]
    """The layers with this change."""

    @property
    def times(self) -> str:
        """``x6`` for several layers, else empty."""
        return f"x{len(self.layers)}" if len(self.layers) > 1 else ""


def rows(differences: Sequence[Difference], actual: Record, expected: Record) -> list[Row]:
    """Return differences as rows: equal ones of repeated layers as one, changed values as one for each layer."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    moved: dict[str, list[Difference]] = {}
    # Of added or removed layers only the outermost is shown.
    outer = {(d.kind, d.layer) for d in differences if d.kind in ("layer added", "layer removed")}
    for difference in differences:
        shown = pattern(difference.layer)
        if difference.change is not None:
            moved.setdefault(shown, []).append(difference)
        elif not any((difference.kind, container) in outer for container in containers(difference.layer)[1:]):
            now, was = _cell(difference.actual), _cell(difference.expected)
            if difference.kind == "layer added" and difference.layer in actual.layers:
                now = actual[difference.layer].type_name
            elif difference.kind == "layer removed" and difference.layer in expected.layers:
                was = expected[difference.layer].type_name
            alike.setdefault((shown, _difference_label(difference), now, was), []).append(difference.layer)
    return [
        *(_row(shown, what, now, was, layers) for (shown, what, now, was), layers in alike.items()),
        *(_moved(shown, found) for shown, found in moved.items()),
    ]


def _row(shown: str, what: str, now: str, was: str, names: Iterable[str]) -> Row:
    layers = tuple(dict.fromkeys(names))
    return Row(layer=shown if len(layers) > 1 else layers[0], what=what, now=now, was=was, layers=layers)


def _moved(shown: str, differences: Sequence[Difference]) -> Row:
    what = listed(list(dict.fromkeys(_difference_label(d) for d in differences)))
    by = moved_by(differences, "up to " if len(differences) > 1 else "")
    return _row(shown, what, by, "", (d.layer for d in differences))


def _difference_label(difference: Difference) -> str:
    kind, what = difference.kind, difference.what
    own, _, how = kind.partition(" ")
    if own in ("parameter", "buffer") and how:
        label = f"{what} {how}"
    elif kind == "attribute":
        label = what
    else:
        label = what if what.startswith(kind) else f"{kind} {what}".strip()
    return f"{label} (call {difference.call + 1})" if difference.call else label


def _cell(value: Plain) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, float) else str(value)

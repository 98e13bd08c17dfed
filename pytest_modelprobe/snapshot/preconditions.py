"""Reasons to refuse an update: the record would differ on another machine, or has values that are not finite.

A snapshot that differs by chance teaches people to update without looking. So an update refuses such a record, says
how to make it repeatable, and names the argument that allows it nevertheless.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from pytest_modelprobe.assertions.activations import assert_finite
from pytest_modelprobe.assertions.gradients import assert_grad_finite
from pytest_modelprobe.comparison import LARGEST_TOLERANCE, Diagnosis
from pytest_modelprobe.comparison import text as comparison_text
from pytest_modelprobe.exceptions import NothingObservedError
from pytest_modelprobe.record import Call, Layer, Reading, Record, address, has_numbers
from pytest_modelprobe.text import count, listed

from .snapshot import Allowed, Arguments


class Refusal(NamedTuple):
    """Why an update wrote nothing."""

    why: str
    step: str = ""
    """What to do before the update is run again; empty if other options are enough."""

    @property
    def message(self) -> str:
        """One sentence, with the next step."""
        return f"{self.why}: {self.step}" if self.step else self.why

    @property
    def next_step(self) -> str:
        """The next step as a sentence."""
        return f"{self.step[:1].upper()}{self.step[1:]}." if self.step else ""


UPDATE_IN_CI = Refusal(
    "not written, because CI is set",
    "run the update on your machine and commit the files, or pass --modelprobe-allow-update-in-ci on the command line",
)
WRITTEN_TWICE = Refusal(
    "not written again, because the test compares two different records under one name=",
    "give each record its own name=, and run the update again",
)
_RELEVANT = 1e-3  # of the largest norm of a gradient at the same call


def without_process_group(processes: int) -> Refusal:
    """Return why nothing is written where ``torchrun`` started processes that do not know of each other."""
    return Refusal(
        f"not written, because torchrun started {processes} processes, and this one has no process group",
        "let a fixture call torch.distributed.init_process_group(), and rank 0 writes; or run pytest without torchrun",
    )


def refuse_record(record: Record, arguments: Arguments) -> Refusal | None:
    """Return why a record is not written as a snapshot; ``None`` if it may be."""
    where = None if "nonfinite" in arguments.allow else nonfinite(record)
    if where:
        return _refusal(where, "fix it", "nonfinite")
    dropped = None if "dropout" in arguments.allow else active_dropout(record)
    if dropped and arguments.compare != "architecture" and has_numbers(record):
        why = f"dropout was active: {dropped}, whose masks differ between platforms"
        return _refusal(why, "run in eval mode, set p to 0", "dropout")
    return None


def refuse_causes(diagnosis: Diagnosis, limit: float) -> Refusal | None:
    """Return the first cause that ``--modelprobe-accept`` does not cover; ``None`` if it covers all.

    It covers a cause that changed less than the limit, and one without a number if no output changed.
    """
    causes = [*diagnosis.causes, *diagnosis.possible]
    others = [c for c in causes if not (diagnosis.unchanged if c.change is None else c.change < limit)]
    if diagnosis.same or (causes and not others):
        return None
    first = comparison_text.cause_text(others[0]) if others else "the cause is unknown"
    more = f" and {count(len(others) - 1, 'more cause')}" if len(others) > 1 else ""
    why = "" if diagnosis.output is None else f": the model's output changed{comparison_text.by(diagnosis.output)}"
    return Refusal(f"not written: {first}{more}, which --modelprobe-accept={limit:g} does not cover{why}")


def refuse_nondeterministic(record: Record, arguments: Arguments) -> Refusal | None:
    """Return why a record is not written whose run differed when it was repeated; ``None`` if it did not."""
    where = None if "nondeterministic" in arguments.allow else nondeterministic(record)
    if where is None:
        return None
    why = f"the run is not repeatable: {where} differs when it is run again from the same seed"
    step = "draw random numbers from the global generators of torch, numpy or random, which are seeded"
    return _refusal(why, step, "nondeterministic")


def _refusal(why: str, step: str, allow: Allowed) -> Refusal:
    step = f'{step}, or pass modelprobe_snapshot(allow="{allow}"), and run the update again'
    return Refusal(f"not written, because {why}", step)


def nonfinite(record: Record) -> str | None:
    """Return a clause that names the first value or gradient that is NaN or infinite; ``None`` if all are finite.

    >>> nonfinite(Record(model="Net"))
    """
    for check in (assert_finite, assert_grad_finite):
        try:
            check(record)
        except NothingObservedError:
            continue
        except AssertionError as error:
            return str(error).partition("\n")[0].partition(";")[0]
    return None


def active_dropout(record: Record) -> str | None:
    """Return the layers with active dropout and their probabilities; ``None`` if there are none.

    >>> from pytest_modelprobe.record import Call
    >>> call = Call(root="drop", root_training=True, index=0, training=True)
    >>> drop = Layer(name="drop", type="torch.nn.Dropout", attributes={"p": 0.1}, calls=(call,))
    >>> active_dropout(Record(model="Net", layers={"drop": drop}))
    'drop (Dropout, 0.1)'
    """
    found = [(layer, p) for layer in record.layers.values() if (p := _dropout_rate(layer))]
    return listed([f"{layer.name} ({layer.type_name}, {p:g})" for layer, p in found]) if found else None


def nondeterministic(record: Record) -> str | None:
    """Return the first value that changed beyond rounding when the run was repeated from the same seed.

    It is ``None`` if there is no such value, or if the run was not repeated.

    >>> nondeterministic(Record(model="Net", noise="not repeatable"))
    """
    if record.noise != "not repeatable":
        return None
    calls = sorted(record.calls, key=lambda pair: pair[1].finished)  # a submodule's call ends first
    values = [(address(layer.name, call, value.path), call, value) for layer, call in calls for value in call.outputs]
    forward = (where for where, _, value in values if _changed(value.forward, LARGEST_TOLERANCE["forward"]))
    # The smallest gradients are rounding errors of sums that cancel.
    backward = (
        f"the gradient of {where}"
        for where, call, value in reversed(values)
        if _changed(value.backward, LARGEST_TOLERANCE["backward"]) and _is_significant(value.backward, call)
    )
    return next(chain(forward, backward), None)


def _changed(reading: Reading | None, most: float) -> bool:
    return reading is not None and (reading.noise or 0.0) > most


def _is_significant(reading: Reading | None, call: Call) -> bool:
    norms = [r.statistics.norm for v in (*call.inputs, *call.outputs) if (r := v.backward) and r.statistics]
    return reading is not None and reading.statistics is not None and reading.statistics.norm > _RELEVANT * max(norms)


def _dropout_rate(layer: Layer) -> float:
    """Return the probability with which a layer drops values; 0 if it drops none."""
    if layer.functional:
        called = [call for call in layer.calls if call.arguments.get("training", True)]
        share = next((call.arguments.get("p", 0.5) for call in called), 0.0) if "dropout" in layer.type_name else 0.0
    else:
        own = "Dropout" in layer.type_name
        # Attention and recurrent layers of torch have a probability, and no layer inside that drops.
        inside = layer.type.startswith("torch.nn.") and "dropout" in layer.attributes
        called = [call for call in layer.calls if call.training]
        share = layer.attributes.get("p" if own else "dropout", 0.0) if called and (own or inside) else 0.0
    return float(share) if isinstance(share, (int, float)) else 0.0

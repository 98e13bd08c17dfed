"""`ModelProbeSnapshot`: the object that the fixture ``modelprobe_snapshot`` returns.

It is compared with ``==`` as syrupy's snapshots are, so a test reads as an assertion about a value. It only finds out
who compares what; `comparer` does the work.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from pytest_modelprobe.comparison import Parts, Tolerance
from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.record import Record, with_applied_gradients
from pytest_modelprobe.text import listed

from .naming import DEVICES
from .outcome import Answer, Outcome

if TYPE_CHECKING:
    from .comparer import Comparer


# --- the arguments of ``modelprobe_snapshot(...)`` --------------------------------------------------------------------

Allowed = Literal["dropout", "nonfinite", "nondeterministic"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a test asks for when it compares with a snapshot."""

    name: str | None = None
    tolerance: Tolerance = None
    compare: Parts = "all"
    strict: bool = False
    """Whether the test gives ``compare="all"``. Then a refactoring fails it too."""
    allow: tuple[Allowed, ...] = ()
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def replaced(self, **given: Any) -> Arguments:
        """Return these arguments, with those replaced that are given and are not ``None``.

        Raises:
            UsageError: An argument has a wrong type or value.
        """
        __tracebackhide__ = True
        allow = given["allow"]
        given["allow"] = ((allow,) if isinstance(allow, str) else tuple(allow)) or None
        name, compare = given["name"], given["compare"]
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= 60):
            raise UsageError(f"name= is a text of 1 to 60 characters; got {name!r}")
        if name is not None and (name.isdigit() or name in ("cpu", *DEVICES)):
            raise UsageError(
                f"name={name!r} is reserved for the file names of numbered or device snapshots: give another"
            )
        if compare is not None and compare not in get_args(Parts):
            raise UsageError(f"compare= is 'all', 'architecture' or 'behavior'; got {compare!r}")
        unknown = [one for one in given["allow"] or () if one not in get_args(Allowed)]
        if unknown:
            raise UsageError(f"allow= takes {listed([repr(one) for one in get_args(Allowed)])}; got {unknown[0]!r}")
        given["strict"] = given["compare"] == "all" if given["compare"] else None
        return dataclasses.replace(self, **{key: value for key, value in given.items() if value is not None})


class ModelProbeSnapshot:
    """Compare a record with files: ``assert modelprobe.run(model, x) == modelprobe_snapshot``.

    The fixture ``modelprobe_snapshot`` is one. Its files are in ``__modelprobe__`` beside the test;
    ``pytest --snapshot-update`` writes them. Calling it returns a snapshot with other options.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, comparer: Comparer, arguments: Arguments) -> None:
        self._comparer = comparer
        self._arguments = arguments

    def __call__(
        self,
        name: str | None = None,
        tolerance: Tolerance = None,
        compare: Parts | None = None,
        allow: Allowed | Iterable[Allowed] = (),
        rename: Mapping[str, str] | None = None,
    ) -> ModelProbeSnapshot:
        """Return a snapshot with other options.

        Args:
            name: Distinguishes the snapshot from others of the same test, instead of a number.
            tolerance: Factor by which the tolerance of every value is multiplied: a number, or a dict of glob of
                layers → number.
            compare: ``architecture`` (names, types, shapes, attributes), ``behavior`` (the numbers), or ``all``, with
                which a refactoring fails too. Both are compared by default.
            allow: What may be recorded although it differs between runs or platforms: active ``dropout``,
                ``nonfinite`` values, or ``nondeterministic`` values, which are then not compared.
            rename: Dict of glob of layers → glob of their names in the snapshot; layers inside them are included.
                It has no effect after an update has written the new names.

        Raises:
            UsageError: An argument has a wrong type or value.
        """
        __tracebackhide__ = True
        arguments = self._arguments.replaced(
            name=name, tolerance=tolerance, compare=compare, allow=allow, rename=rename
        )
        return ModelProbeSnapshot(self._comparer, arguments)

    def __eq__(self, other: object) -> bool:
        """Whether a record equals the one on disk. An update writes the record, and then it is equal.

        In a list of steps, each step has files of its own. Only the first step that differs is reported, because the
        later ones follow from it.
        """
        __tracebackhide__ = True
        outcome = self._outcome(other, sys._getframe(1))
        return outcome.passed or cast(bool, Answer(outcome, unequal=False))

    def __ne__(self, other: object) -> bool:
        """Whether a record differs from the one on disk. A difference is no failure then."""
        __tracebackhide__ = True
        outcome = self._outcome(other, sys._getframe(1))
        return not outcome.passed and cast(bool, Answer(outcome, unequal=True))

    def _outcome(self, other: object, caller: FrameType) -> Outcome:
        __tracebackhide__ = True
        if isinstance(other, Sequence) and not isinstance(other, str):
            return self._outcome_of_steps(other, caller)
        return self._comparer.compare(_record(other), self._arguments, caller=caller)

    def _outcome_of_steps(self, records: Sequence[object], caller: FrameType) -> Outcome:
        __tracebackhide__ = True
        if not records:
            raise UsageError("there is no step to compare: no optimizer with a parameter of the model has stepped")
        for number, record in enumerate(records, 1):
            name = f"{self._arguments.name}.{number}" if self._arguments.name else f"step{number}"
            arguments = dataclasses.replace(self._arguments, name=name)
            outcome = self._comparer.compare(_record(record), arguments, caller=caller)
            if not outcome.passed:
                outcome.text = f"step {number} of {len(records)}: {outcome.text}"
                break
        return outcome

    def __repr__(self) -> str:
        return f"<modelprobe_snapshot of {self._comparer.name}>"

    @property
    def failure(self) -> str | None:
        """The message of the newest comparison of the test; ``None`` if it was equal."""
        return self._comparer.read_failure()


def _record(other: object) -> Record:
    __tracebackhide__ = True
    if not isinstance(other, Record):
        name = type(other).__name__
        advice = {
            "Watch": "choose the forwards: watch.first == modelprobe_snapshot, watch.first_step of training, or "
            "watch.record for all of them",
            "Invariants": "write assert_invariants(watch, Invariants.load(path)), which names the steps too",
            "ModelProbe": "write modelprobe.record == modelprobe_snapshot",
        }
        step = advice.get(name, "write modelprobe.run(model, ...) == modelprobe_snapshot")
        raise TypeError(f"modelprobe_snapshot compares records, and this is a {name}: {step}")
    if is_training(other):
        raise UsageError(
            f"a record of {other.forwards} forwards and {other.backwards} backwards is not reproducible on other "
            "machines: where parameters change in between, another number of threads changes the numbers of the 20th "
            "step by 0.1 %. Compare watch.first_step"
        )
    return with_applied_gradients(other)


def is_training(record: Record) -> bool:
    """Whether a record merges several forwards and backwards of a training loop, and not those of one step.

    Its numbers are not reproducible: another number of threads changes those of the 20th step by 0.1 %.
    """
    return record.loss is None and record.step is None and record.forwards > 1 and record.backwards > 0

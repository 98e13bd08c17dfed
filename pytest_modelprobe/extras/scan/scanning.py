"""A model as it is scanned: made, run on inputs that fit, and checked."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pytest_modelprobe import assertions
from pytest_modelprobe.assertions.findings import findings, hints
from pytest_modelprobe.checks import STANDARD, Outcome, battery, outcome
from pytest_modelprobe.exceptions import ModelProbeError, UsageError
from pytest_modelprobe.probe import ModelProbe
from pytest_modelprobe.record import ROOT, Record
from pytest_modelprobe.runs import NoGradientError

from .search import NO_TENSOR, Input, Search, arguments, of_argument, required
from .target import Target


class ScannedModel:
    """A model, inputs that fit it, and its record.

    Args:
        target: Makes the model.
        probe: Gives the device and the seed.
        inputs: The inputs; empty: guessed.
        command: The command that is run, for the message if no input is found.

    Raises:
        UsageError: The model cannot be made, or does not run on the inputs, or on none that was guessed; the message
            says why, and how inputs are given.

    >>> from pytest_modelprobe.extras.scan.target import load
    >>> scanned = ScannedModel(load("torch.nn:Identity"), ModelProbe(), [Input((4, 8))])
    >>> scanned.record.forwards, [outcome.verdict for outcome in scanned.outcomes(["finite"])]
    (1, ['holds'])
    """

    def __init__(
        self,
        target: Target,
        probe: ModelProbe,
        inputs: Sequence[Input] = (),
        *,
        command: str = "modelprobe scan {}",
    ) -> None:
        self.target, self.probe, self._command = target, probe, command
        self.model = self._built()
        if len({one.name is None for one in inputs}) > 1:
            raise UsageError(f"{shown(inputs)}: name every input, or none")
        self.is_guessed = not inputs
        self._no_gradient = ""
        self.inputs = list(inputs) or self._guessed()

    def _built(self) -> nn.Module:
        try:
            return self.probe.build(self.target.make)
        except ModelProbeError:
            raise
        except Exception as error:  # whatever the code of a model raises
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if "site-packages" not in frame.filename]
            at = (own or frames)[-1]
            raise UsageError(
                f"{self.target.name} makes no model: {outcome.line_of(error)} ({at.filename}:{at.lineno})"
            ) from error

    @property
    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Positional and keyword arguments."""
        return arguments(self.inputs, self.probe)

    @functools.cached_property
    def record(self) -> Record:
        """A forward of the model as it was made, with a backward if the output has a gradient.

        Raises:
            UsageError: The model does not run on the inputs; the message says why.
        """
        args, kwargs = self.arguments
        run = functools.partial(self.probe.run, self.model, *args, kwargs=kwargs, isolate=False)
        try:
            try:
                return run(loss="random")
            except NoGradientError as error:
                self._no_gradient = outcome.line_of(error)
                return run()
        except Exception as error:  # whatever a model raises on inputs that do not fit
            raise UsageError(
                f"{type(self.model).__name__} does not run on {shown(self.inputs)}: {outcome.line_of(error)}"
            ) from error

    def findings(self) -> list[str]:
        """Return a line for each thing that is wrong with the record, and for each assertion that fails beyond them.

        The file of tests expects its assertions to fail for these reasons.
        """
        found = findings(self.record)
        floating = any(value.is_floating for _, value in self.record[ROOT].outputs)
        trainable = any(parameter.requires_grad for parameter in nn.Module.parameters(self.model))
        if self._no_gradient and trainable and floating:
            found.append(f"no gradient: {self._no_gradient}")
        for name, line in self.failed_assertions().items():
            if not any(finding.startswith(_TOLD_BY[name]) for finding in found):
                found.append(line)
        return found

    def hints(self) -> list[str]:
        """Return a line for each thing of the record that is often wrong and may be meant."""
        return hints(self.record)

    def failed_assertions(self) -> dict[str, str]:
        """Return each assertion on the record that fails, and the first line of what it says."""
        found = {}
        for name in applicable_assertions(self.record):
            try:
                getattr(assertions, name)(self.record)
            except AssertionError as error:
                found[name] = str(error).partition("\n")[0]
        return found

    def outcomes(self, names: Sequence[str] = tuple(STANDARD)) -> Iterator[Outcome]:
        """Yield the outcome of each standard check, as soon as it is known.

        Raises:
            UsageError: At the end, if the model returns tensors in neither mode.
        """
        args, kwargs = self.arguments
        skipped = False
        for name in names:
            check = STANDARD[name]
            options: Mapping[str, Any] = {"factory": self.target.make} if "factory" in check.options else {}
            found = check.outcome(self.probe, self.model, *args, kwargs=kwargs, **options)
            skipped |= found.verdict == "not applicable"
            yield found
        if skipped:
            battery.check_runs(self.probe, self.model, args, kwargs)

    def _guessed(self) -> list[Input]:
        """Return the first inputs that are found and on which the model runs."""
        search = Search(self.model)
        for inputs in search:
            self.inputs = list(inputs)
            try:
                self.record  # noqa: B018 - it is kept
            except UsageError as error:
                if inputs == search.best:
                    search.refusal = error.__cause__
            else:
                return self.inputs
        others = [name for name in required(self.model.forward) if of_argument(self.model, name) is NO_TENSOR]
        if others:
            name = type(self.model).__name__
            raise UsageError(
                f"{name} takes no tensor as {' and '.join(others)}: name a module that calls it with tensors"
            )
        given = search.best or [f"{name}=SHAPE" for name in required(self.model.forward)] or ["SHAPE"]
        start = " ".join([self._command.format(self.target.name), *(f"--input {one}" for one in given)])
        why = f" It got furthest on these: {outcome.line_of(search.refusal)}" if search.refusal else ""
        raise UsageError(f"the inputs of {type(self.model).__name__} cannot be guessed, start from: {start}.{why}")


NO_GRADIENT = ("never called", "no gradient")
"""How findings begin that name all parameters without a gradient."""

_TOLD_BY = {
    "assert_finite": ("not finite",),
    "assert_no_dead_layers": ("dead",),
    "assert_grad_finite": ("not finite",),
    "assert_all_params_have_grad": NO_GRADIENT,
}
"""Each assertion, and the findings that say the same."""


def applicable_assertions(record: Record) -> list[str]:
    """Return the names of the assertions that any model is expected to pass.

    >>> applicable_assertions(Record(model="Net", forwards=1))
    ['assert_finite', 'assert_no_dead_layers']
    """
    of_gradients = ["assert_grad_finite", "assert_all_params_have_grad"] if record.backwards else []
    return ["assert_finite", "assert_no_dead_layers", *of_gradients]


def shown(inputs: Sequence[Input]) -> str:
    """Return inputs as the command line takes them."""
    return " ".join(map(str, inputs)) or "no inputs"


# --- a file of tests --------------------------------------------------------------------------------------------------


def as_test_file(scanned: ScannedModel, outcomes: Sequence[Outcome]) -> str:
    """Return a file of tests: assertions, a snapshot, and the standard checks.

    What fails is expected to fail there, with what was said of it: the file passes, and lists what is left to do.
    """
    target, inputs = scanned.target, scanned.inputs
    loss = ', loss="random"' if scanned.record.backwards else ""
    assertions = applicable_assertions(scanned.record)
    failed = "; ".join(scanned.findings()) if scanned.failed_assertions() else ""
    expected = f"@pytest.mark.xfail(reason={_quoted(failed)}, strict=True)\n" if failed else ""
    names = ", ".join(sorted([*assertions, "checks"]))
    broken = {outcome.check: outcome.text.partition("\n")[0] for outcome in outcomes if outcome.verdict == "broken"}
    xfail = "".join(f"\n        {_quoted(check)}: {_quoted(line)}," for check, line in broken.items())
    given = "**inputs(modelprobe)" if _are_named(inputs) else "*inputs(modelprobe)"
    is_called_alone = target.expression == f"{target.attribute}()"
    factory = target.attribute if is_called_alone else "make_model"
    wrapper = "" if is_called_alone else f"def make_model():\n    return {target.expression}\n\n\n"
    return f'''"""Tests of {target.name}."""

{"import pytest" + chr(10) * 2 if failed else ""}from {target.module} import {target.attribute}
from pytest_modelprobe import {names}


{wrapper}def inputs(modelprobe):
{_returned(inputs)}


{expected}def test_layers(modelprobe):
    record = modelprobe.run(modelprobe.build({factory}), {given}{loss})
{"".join(f"    {assertion}(record)" + chr(10) for assertion in assertions)}

def test_snapshot(modelprobe, modelprobe_snapshot):
    model = modelprobe.build({factory}).eval()
    assert modelprobe.run(model, {given}{loss}) == modelprobe_snapshot


CASE = checks.Case(
    name={_quoted(target.attribute)},
    factory={factory},
    inputs=inputs,
    xfail={{{xfail}{chr(10) + "    " if xfail else ""}}},
)


@checks.parametrize_with_checks([CASE])
def test_standard(modelprobe, check):
    check(modelprobe)
'''


def _returned(inputs: Sequence[Input]) -> str:
    tensors = [(one.name, one.code(position)) for position, one in enumerate(inputs)]
    if not inputs:
        return "    return ()"
    opening, closing = ("{", "}") if _are_named(inputs) else ("(", ")")
    lines = "".join(f"        {f'{_quoted(name)}: ' if name else ''}{code},\n" for name, code in tensors)
    return f"    return {opening}\n{lines}    {closing}"


def _are_named(inputs: Sequence[Input]) -> bool:
    return bool(inputs) and inputs[0].name is not None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

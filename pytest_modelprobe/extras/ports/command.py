"""`modelprobe compare`: two implementations on the same inputs, without a test.

Like `scan` it runs models, so it imports torch when it is called.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_modelprobe.cli import DIFFERENT, SAME
from pytest_modelprobe.exceptions import ModelProbeError, UsageError
from pytest_modelprobe.text import count, listed, printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pytest_modelprobe.extras.scan.search import Input
    from pytest_modelprobe.probe import ModelProbe

    from .pairing import Pairing

    _Call = tuple[tuple[Tensor, ...], dict[str, Any]]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of `modelprobe`."""
    compare = commands.add_parser(
        "compare",
        help="run two implementations on the same inputs, and name the first layer that differs",
        description="Make two models, pair their layers by what flows through them, and compare the outputs of pairs.",
    )
    compare.add_argument("a", metavar="A:NAME", help="a function or a class that makes the reference")
    compare.add_argument("b", metavar="B:NAME", help="the same for the port")
    told = "a tensor that both take, as for scan; may be repeated; guessed from A by default"
    compare.add_argument("--input", action="append", default=[], metavar="[NAME=]SHAPE[:BELOW]", help=told)
    told = "the same tensors by the names that B has for them; those of A by default"
    compare.add_argument("--input-b", action="append", default=[], metavar="[NAME=]SHAPE[:BELOW]", help=told)
    told = "layers that are the same, such as 'blocks.*=transformer.h.*'; may be repeated"
    compare.add_argument("--rename", action="append", default=[], metavar="B=A", help=told)
    compare.add_argument("--weights", choices=["a"], help="set the weights of B from those of A by the pairing")
    compare.add_argument("--device", default="cpu", metavar="DEVICE", help="cpu, cuda, cuda:N or mps (default: cpu)")
    compare.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Make both models, run them on the same inputs, and print the pairing and the first pair that differs."""
    rename = dict(map(_rule, options.rename))
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does
    import torch

    from pytest_modelprobe.extras.scan.scanning import ScannedModel
    from pytest_modelprobe.extras.scan.search import parse_input
    from pytest_modelprobe.extras.scan.target import load
    from pytest_modelprobe.probe import ModelProbe

    inputs, others = ([parse_input(text) for text in given] for given in (options.input, options.input_b))
    with ModelProbe(options.device) as probe:
        try:
            command = f"modelprobe compare {{}} {options.b}"
            reference = ScannedModel(load(options.a), probe, inputs, command=command)
            port = ScannedModel(load(options.b), probe, others or reference.inputs)
            for side in (reference, port):  # as the factory makes it: its own weights, by one seed
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(probe.seed)
                    side.model = side.target.make()
        except SystemExit as error:  # with code 0 it would read as models that are the same
            raise ModelProbeError(f"a model ends the process: it calls sys.exit({error.code!r})") from error
        longest = max(reference.inputs, port.inputs, key=len)
        tensors = [one.tensor(probe, at) for at, one in enumerate(longest)]
        for one, tensor in zip(port.inputs, tensors, strict=False):
            if math.prod(one.shape) != tensor.numel():
                raise UsageError(f"--input-b {one} has another shape than {tuple(tensor.shape)}, that of A's input")
        shared = min(len(reference.inputs), len(port.inputs))
        calls = [_call(side.model, side.inputs, tensors, shared) for side in (port, reference)]
        return _show(port.model, reference.model, calls, probe, rename, carries=options.weights == "a")


def _call(model: nn.Module, inputs: Sequence[Input], tensors: Sequence[Tensor], shared: int) -> _Call:
    """Return the arguments that both models take. Those that only this one takes are bound to its forward.

    Else fingerprints could not always be compared: where samples have one first input, the others draw the signs.
    """
    given = [(one.name, x.reshape(one.shape)) for one, x in zip(inputs, tensors, strict=False)]
    args = tuple(x for name, x in given if name is None)
    kwargs = {name: x for name, x in given if name is not None}
    if len(inputs) > shared:
        names = [one.name for one in inputs[shared:] if one.name is not None]
        taken = [name for name in inspect.signature(model.forward).parameters if name not in kwargs]
        if len(args) > len(taken):
            raise UsageError(f"{count(len(args), 'input')} given, but {type(model).__name__} takes {', '.join(taken)}")
        own = {name: kwargs.pop(name) for name in names} | dict(zip(taken[shared:], args[shared:], strict=False))
        model.forward = functools.partial(model.forward, **own)
        args = args[:shared]
    return args, kwargs


def _show(
    port: nn.Module,
    reference: nn.Module,
    calls: Sequence[_Call],
    probe: ModelProbe,
    rename: dict[str, str],
    *,
    carries: bool,
) -> int:
    """Compare two live models on inputs that are the same, and print what differs."""
    from .pairing import port_failure
    from .weights import carry, recognized

    pairing = _paired(port, reference, calls, probe, rename)
    if carries:
        carried, _ = carry(reference, port, pairing.names)
        print(f"Weights: {count(len(carried), 'parameter')} of B set from A's by the pairing")
        pairing = _paired(port, reference, calls, probe, rename)
    found = recognized(port, reference)
    left = [name for name, _ in port.named_parameters() if name not in found]
    alike = [name for name, where in found.items() if not where]
    said = f", {len(alike)} not told apart" if alike else ""
    print(f"Weights: {count(len(found) - len(alike), 'parameter')} of B recognized in A{said}, {len(left)} not")
    for name, where in found.items():
        if " " in where:
            print(printable(f"  {name} = {where}"))
    if alike:
        print(printable(f"  not told apart, as all their elements are one number: {listed(alike)}"))
    if left:
        advice = "" if carries else "; --weights=a sets what the pairing maps"
        print(printable(f"  not recognized: {listed(left)}{advice}"))
    message = port_failure(pairing, unknown=left)
    if told := message or str(pairing):  # nothing if all layers have a partner of the same name
        print("", *map(printable, told.split("\n")), sep="\n")
    if message:
        return DIFFERENT
    print(f"\nSame: {count(len(pairing.steps), 'pair')} of layers")
    return SAME


def _paired(
    port: nn.Module, reference: nn.Module, calls: Sequence[_Call], probe: ModelProbe, rename: dict[str, str]
) -> Pairing:
    from .pairing import pair

    records = []
    first = [next(iter((*args, *kwargs.values())), None) for args, kwargs in calls]
    flat = None not in first and len({x.shape for x in first if x is not None}) > 1  # one has no batch axis
    for letter, model, (args, kwargs), x in zip("BA", (port, reference), calls, first, strict=True):
        tokens = x.new_ones(x.shape[:-1] if x.is_floating_point() else x.shape) if flat and x is not None else None
        try:
            records.append(probe.run(model, *args, mode="eval", tokens=tokens, kwargs=kwargs, isolate=False))
        except ModelProbeError:
            raise
        except Exception as error:  # whatever a model raises on inputs that do not fit
            way = "give its inputs with --input-b" if letter == "B" else "give others with --input"
            raise UsageError(
                f"{letter} ({type(model).__name__}) does not run on these inputs: {error}; {way}"
            ) from error
    actual, expected = records
    live = expected.live_run
    return pair(actual, live.measured(expected) if live is not None else expected, rename)


def _rule(text: str) -> tuple[str, str]:
    mine, equals, theirs = text.partition("=")
    if not (mine and equals and theirs):
        raise UsageError(f"{text!r} is no rename: write B's glob and A's, such as blocks.*=transformer.h.*")
    return mine, theirs

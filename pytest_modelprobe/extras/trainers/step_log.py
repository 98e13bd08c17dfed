"""Watch one step of training in N, and write its record.

A watched step is slower than others, and its record is large, so a training run records only some. All callbacks
share this class: each only says where in its library a step begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from pytest_modelprobe.exceptions import UsageError
from pytest_modelprobe.extras.exporters.export import Exporter, exporter
from pytest_modelprobe.record import Record, Selector, writing_rank
from pytest_modelprobe.runs import Watch


class StepLog:
    """Writes the record of every ``every``-th step of training, from the first on; between them nothing is watched.

    Each callback has one, and a training loop of your own may use it too. With several ranks only rank 0 writes, and
    only what it saw of the batch.

    Args:
        folder: Where to write ``step-00000100.json``, which `Record.load` reads; made if it is not there.
        every: How many steps there are from one record to the next.
        layers: Which layers to record.
        tensorboard: Whether to write scalars for TensorBoard into the folder too.
        assertions: Called with each record after it was written: ``[assert_finite, assert_grad_finite]``. What they
            raise ends the run.

    Raises:
        UsageError: ``every`` is no number of steps.

    >>> import tempfile
    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = StepLog(folder, every=2)
    ...     for step in range(4):
    ...         log.begin(model, step)
    ...         model(torch.ones(3, 2)).sum().backward()
    ...         optimizer.step()
    ...         log.end()
    ...     log.close()
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['step-00000000.json', 'step-00000002.json']
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 100,
        layers: Selector = "**",
        tensorboard: bool = False,
        assertions: Sequence[Callable[[Record], object]] = (),
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise UsageError(f"every is how many steps there are from one record to the next, 1 or more; got {every!r}")
        self._folder = Path(folder)
        self._every = every
        self._layers = layers
        self._assertions = assertions
        self._watch: Watch | None = None
        self._step = 0
        self._exit = ExitStack()
        self._tensorboard = tensorboard
        self._scalars: Exporter | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Watch the model if the step, counted from 0, is one of those that are written. Safe to repeat."""
        if self._watch is None and step % self._every == 0 and writing_rank().rank == 0:
            self._watch = Watch(model, layers=self._layers, isolate=False)
            self._step = step

    def end(self) -> None:
        """Write the record if an optimizer has taken the step that is watched, and call the assertions with it."""
        __tracebackhide__ = True
        if self._watch is None or not self._watch.steps:
            return
        record = self._watch.first_step
        self._stop()
        record.save(self._folder / f"step-{self._step:08}.json")
        if self._tensorboard:
            # The exporter is made here and not before, because a launcher copies callbacks into the ranks, and only
            # then is it known which rank writes.
            if self._scalars is None:
                self._scalars = self._exit.enter_context(exporter("tensorboard", log_dir=self._folder))
            self._scalars.write(record, self._step)
        for assertion in self._assertions:
            assertion(record)

    def close(self) -> None:
        """Stop watching, and write what is not written yet. Safe to repeat."""
        self._stop()
        self._scalars = None
        self._exit.close()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

"""Records in TensorBoard: scalars, and histograms where the record has them.

The bins of a record are handed on as they are: the tensor is gone, and TensorBoard accepts bins of any width.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_modelprobe.record import Reading, Record

from .export import readings, scalars

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class TensorBoardExporter:
    """Writes ``layer/output_mean`` and the like as scalars, and histograms of records with ``histograms=True``.

    Args:
        log_dir: The folder that TensorBoard is given.
    """

    def __init__(self, log_dir: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(log_dir))

    def write(self, record: Record, step: int | None = None) -> None:
        """Write the numbers of a record."""
        for layer, name, value in scalars(record):
            self._writer.add_scalar(f"{layer}/{name}", value, step)
        for layer, quantity, reading in readings(record):
            self._write_histogram(f"{layer}/{quantity}", reading, step)

    def _write_histogram(self, tag: str, reading: Reading, step: int | None) -> None:
        numbers, histogram = reading.statistics, reading.histogram
        if numbers is None or numbers.mean is None or numbers.rms is None or histogram is None:
            return
        edges, counts = histogram.bins()
        self._writer.add_histogram_raw(
            tag,
            min=numbers.min,
            max=numbers.max,
            num=numbers.finite,
            sum=numbers.mean * numbers.finite,
            sum_squares=numbers.rms**2 * numbers.finite,
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def write_figure(self, title: str, figure: Figure, step: int | None = None) -> None:
        """Write a figure of matplotlib as an image."""
        import numpy
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        # `SummaryWriter.add_figure` does this through pyplot, which sets a backend.
        canvas: Any = FigureCanvasAgg(figure)
        canvas.draw()
        self._writer.add_image(title, numpy.array(canvas.buffer_rgba())[..., :3], step, dataformats="HWC")

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()

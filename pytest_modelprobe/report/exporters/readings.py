"""The readings of a record that are exported, each with a name."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_modelprobe.record import Reading, Record


def readings(record: Record) -> Iterator[tuple[str, str, Reading]]:
    """Yield layer, quantity and reading: first output of the first call and its gradient, parameters and theirs.

    >>> from pytest_modelprobe.record import Layer, Parameter
    >>> bias = Parameter(name="bias", shape=(2,), dtype="float32", device="cpu")
    >>> fc = Layer(name="fc", type="Linear", parameters=(bias,))
    >>> [names for *names, _ in readings(Record(model="Net", layers={"fc": fc}))]
    [['fc', 'bias']]
    """
    for layer in record.layers.values():
        for value in layer.calls[0].outputs[:1] if layer.calls else ():
            yield layer.name, "output", value.forward
            if value.backward is not None:
                yield layer.name, "output_gradient", value.backward
        for parameter in layer.parameters:
            if parameter.tied_to is None:
                yield layer.name, parameter.name, parameter.reading
                if parameter.gradient is not None:
                    yield layer.name, f"{parameter.name}_gradient", parameter.gradient


def scalars(record: Record) -> Iterator[tuple[str, str, float]]:
    """Yield layer, name and value: mean, std and rms of what `readings` yields, of gradients the rms alone.

    Tensors without finite elements have none.
    """
    for layer, quantity, reading in readings(record):
        for statistic in ("rms",) if quantity.endswith("_gradient") else ("mean", "std", "rms"):
            value = None if reading.statistics is None else getattr(reading.statistics, statistic)
            if value is not None:
                yield layer, f"{quantity}_{statistic}", float(value)

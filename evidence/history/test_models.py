"""One test a model, as a user would write it: under the first version it writes snapshots, then compares with them.

It is copied into the folder of a pair of versions, as ``test_<library>.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import models_of

FOLDER = Path(__file__).parent
MODELS = models_of(Path(__file__).stem.removeprefix("test_"))


@pytest.mark.parametrize("name", [name for name in MODELS if (FOLDER / f"{name}.truth.pt").exists()])
def test_model(name: str, modelprobe: Any, modelprobe_snapshot: Any) -> None:
    model, _ = MODELS[name].load(FOLDER)
    inputs = MODELS[name].inputs()
    record = modelprobe.run(model, *inputs.args, kwargs=inputs.kwargs, loss="random")
    assert record == modelprobe_snapshot

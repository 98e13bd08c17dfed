"""What the tests of checks share."""

from __future__ import annotations

import pytest
import torch

from pytest_modelprobe import ModelProbe


@pytest.fixture
def probe() -> ModelProbe:
    torch.manual_seed(0)  # of weights
    return ModelProbe()

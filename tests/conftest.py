"""Shared by all tests. The plugin's own tests run pytest within pytest."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 - pytester restores sys.modules, and torch cannot be imported twice

pytest_plugins = ["pytester"]

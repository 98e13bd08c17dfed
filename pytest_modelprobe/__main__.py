"""``python -m pytest_modelprobe`` is the command `modelprobe`, where no script is installed."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

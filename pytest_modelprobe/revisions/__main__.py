"""The process of the other side: ``python -m pytest_modelprobe.revisions JOB ANSWER``."""

import sys

from .side import main

main(*sys.argv[1:])

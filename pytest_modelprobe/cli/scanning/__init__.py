"""A model that is named on the command line: its inputs, its findings, the standard checks, and a file of tests."""

from .inputs import Input, parse_input
from .scanning import ScannedModel
from .target import Target, load
from .test_file import as_test_file

__all__ = ["Input", "ScannedModel", "Target", "as_test_file", "load", "parse_input"]

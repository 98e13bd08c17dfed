"""Run a test in several processes, the ranks of one distributed run, and merge what they report."""

from .protocol import run_in_ranks

__all__ = ["run_in_ranks"]

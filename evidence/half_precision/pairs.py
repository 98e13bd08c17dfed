"""Pairs."""

from held_out import Pair

PAIRS: list[Pair] = []

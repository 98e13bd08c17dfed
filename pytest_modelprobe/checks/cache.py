"""Caches and hidden states: the arguments that take them, and where they are in an output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CACHES = ("past_key_values", "cache_params")
"""Names of caches in transformers, as an argument and in the output."""

KEYS_AND_VALUES = ("past_key_values", "kv_cache", "cache", "past")
"""Names of arguments for keys and values of earlier positions."""

STATES = (*CACHES, *KEYS_AND_VALUES[1:], "hx", "hidden", "hidden_state", "state")
"""Names of arguments for a state, None at first."""


def state_of(output: Any, name: str) -> Any:
    """Return the state in the output of a forward; None if there is none.

    >>> state_of({"logits": 1, "past_key_values": 2}, "past_key_values"), state_of((1, 2), "hx")
    (2, 2)
    """
    if isinstance(output, Mapping):
        return output.get(name)
    if hasattr(output, name):
        return getattr(output, name)
    return output[1] if isinstance(output, tuple) and len(output) == 2 and name not in CACHES else None

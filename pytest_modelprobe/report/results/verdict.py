"""How a run ended, in words: the head of each report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_modelprobe.text import count

FAILED = ("failed", "error")
"""The outcomes of a test that failed."""


def verdict(results: Mapping[str, Any], causes: int = 0) -> str:
    """Return how a run ended, what is wrong first. Tests pass on both sides although a model changed.

    Args:
        results: The results of the run.
        causes: The number of causes, if it is to be said.

    >>> test = {"outcome": "passed"}
    >>> verdict({"tests": [test]})
    'No test failed: 1 test.'
    >>> base = {"ref": "main", "stopped": None, "unchanged": 10, "rounding": 0, "changed": 2}
    >>> verdict({"tests": [test], "base": base}, causes=1)
    '2 of 12 models changed beside main, for 1 cause. No test failed: 1 test.'
    >>> verdict({"tests": [test, {"outcome": "failed"}], "base": base})
    '1 of 2 tests failed, and 2 of 12 models changed beside main.'
    """
    tests, base = results["tests"], results.get("base")
    failed = sum(test["outcome"] in FAILED for test in tests)
    compared = "" if base is None else _compared(base)
    is_changed = base is not None and base["changed"] > 0
    wrong = [f"{failed} of {count(len(tests), 'test')} failed"] if failed else []
    wrong += [compared] if is_changed else []
    said = [", and ".join(wrong) + (f", for {count(causes, 'cause')}" if causes else "")] if wrong else []
    said += [compared] if compared and not is_changed else []
    if not failed:
        said.append(f"No test failed: {count(len(tests), 'test')}" if tests else "No test used a probe")
    return " ".join(f"{one}." for one in said)


def _compared(base: Mapping[str, Any]) -> str:
    side = base["ref"] or base["python"]
    compared = sum(base[verdict] for verdict in ("unchanged", "rounding", "changed"))
    if base["stopped"] or not compared:
        return f"No model was compared with {side}"
    return f"{base['changed']} of {count(compared, 'model')} changed beside {side}"


def side_name(base: Mapping[str, Any]) -> str:
    """Return the other side in words.

    >>> side_name({"ref": "main", "commit": "0123456789abcdef", "python": None})
    'main (0123456789)'
    """
    commit = f"{base['ref']} ({base['commit'][:10]})" if base["commit"] else ""
    return " under ".join(filter(None, (commit, base["python"])))

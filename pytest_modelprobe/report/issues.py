"""What the results of a run object to, each at a line of a file: for services that show it beside the code."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pytest_modelprobe.text import printable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One thing that a run of the tests found."""

    rule: str
    """``snapshot/`` and the kind of a cause, ``finding/`` and its kind, ``snapshot`` or ``test``."""
    level: Literal["error", "warning"]
    message: str
    """Printable."""
    test: str
    """Node id of the test."""
    file: str
    """Relative to pytest's root directory."""
    line: int
    """From 1."""
    identity: str = ""
    """The same for the same issue in another run, whatever its numbers are; different from those of other issues."""


def issues(results: Mapping[str, Any]) -> list[Issue]:
    """Return what is wrong in the results of a run (``--modelprobe-json``), errors and warnings.

    Causes of a changed snapshot are at the line of the layer's class where that is known, all others at their test.

    >>> cause = {
    ...     "kind": "weights",
    ...     "layer": "fc",
    ...     "said": "fc: weights changed",
    ...     "source": {"file": "net.py", "line": 3},
    ... }
    >>> snapshot = {"verdict": "changed", "first_line": "fc: weights changed", "causes": [cause]}
    >>> test = {"id": "test_net.py::test_a", "outcome": "failed", "file": "test_net.py", "line": 7, "message": ""}
    >>> (issue,) = issues({"tests": [{**test, "runs": [], "snapshots": [snapshot]}]})
    >>> issue.rule, issue.message, issue.file, issue.line
    ('snapshot/weights', 'fc: weights changed', 'net.py', 3)
    """
    found = []
    times = Counter[str]()
    for test in results["tests"]:
        for rule, level, message, what, source in _of_test(test):
            key = "\0".join((rule, test["id"], what))
            times[key] += 1
            where = source or {"file": test["file"], "line": test["line"]}
            found.append(
                Issue(
                    rule=rule,
                    level=level,
                    message=printable(message),
                    test=test["id"],
                    file=where["file"],
                    line=max(where["line"] or 1, 1),
                    identity=hashlib.sha256(f"{key}\0{times[key]}".encode("utf-8", "replace")).hexdigest(),
                )
            )
    return found


_Found = tuple[str, Literal["error", "warning"], str, str, dict[str, Any] | None]
"""Rule, level, message, what it is about, where its source is."""


def _of_test(test: Mapping[str, Any]) -> Iterator[_Found]:
    unequal = [s for s in test["snapshots"] if s["verdict"] in ("changed", "new", "unreadable")]
    for snapshot in unequal:
        name = snapshot.get("snapshot", "")
        for cause in snapshot["causes"]:
            yield f"snapshot/{cause['kind']}", "error", cause["said"], f"{name} {cause['layer']}", cause.get("source")
        if not snapshot["causes"]:
            yield "snapshot", "error", snapshot["first_line"], name, None
    if test["outcome"] in ("failed", "error") and not unequal:
        yield "test", "error", test["message"] or "the test failed", "", None
    for run in test["runs"]:
        for finding in run["findings"]:
            kind, colon, _ = finding.partition(":")
            rule = f"finding/{kind.replace(' ', '-')}" if colon and kind in _FINDINGS else "finding"
            yield rule, "warning", f"{run['name']}: {finding}", f"{run['name']} {kind}", None


_FINDINGS = {"dead", "not finite", "never called", "no gradient", "experts without a gradient", "rounding"}

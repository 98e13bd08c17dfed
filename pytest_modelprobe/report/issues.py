"""What is wrong in the results of a run, each thing at a line of a file, for GitLab and as SARIF.

Code hosts show it beside the code, and follow it from run to run. So each issue has an identity, which is made without
numbers: a change of 3 % and one of 4 % are the same issue.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import quote

from pytest_modelprobe.text import printable

from .results import CaseResult, Compared, Results, Source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One thing that a run of the tests found."""

    rule: str
    """``snapshot/weights`` or ``base/weights`` for a cause, ``finding/dead`` for a finding, else ``snapshot``,
    ``base`` or ``test``."""
    level: Literal["error", "warning"]
    message: str
    """What is wrong, printable."""
    test: str
    """The node id of the test."""
    file: str
    """The path of the file, relative to pytest's root directory."""
    line: int
    """The number of the line, from 1."""
    identity: str = ""
    """A digest that is the same for this issue in every run, whatever its numbers, and different for every other."""


def issues(results: Results) -> list[Issue]:
    """Return what is wrong in the results of a run, errors and warnings.

    A cause of a changed snapshot, or of a difference from the other side, stands at the line of the layer's class if
    that is known. All else stands at its test.
    """
    found = []
    times = Counter[str]()
    for test in results.tests:
        for rule, message, what, source in _of_test(test):
            key = "\0".join((rule, test.id, what))
            times[key] += 1
            where = source or Source(file=test.file, line=test.line)
            found.append(
                Issue(
                    rule=rule,
                    level="warning" if rule.startswith("finding") else "error",
                    message=printable(message),
                    test=test.id,
                    file=where.file,
                    line=max(where.line or 1, 1),
                    identity=hashlib.sha256(f"{key}\0{times[key]}".encode("utf-8", "replace")).hexdigest(),
                )
            )
    return found


def _of_test(test: CaseResult) -> Iterator[tuple[str, str, str, Source | None]]:
    """Yield the rule, the message, what it is about, and where its source is."""
    unequal = [one for one in test.snapshots if one.verdict in ("changed", "new", "unreadable")]
    compared: list[tuple[str, str, Compared]] = [("snapshot", one.snapshot, one) for one in unequal]
    for rule, name, one in [*compared, *(("base", pair.record, pair) for pair in test.changed)]:
        for cause in one.causes:
            yield f"{rule}/{cause.kind}", cause.said, f"{name} {cause.layer}", cause.source
        if not one.causes:
            yield rule, one.first_line, name, None
    if test.failed and not unequal:
        yield "test", test.message or "the test failed", "", None
    for run in test.runs:
        for finding in run.findings:
            kind, colon, _ = finding.partition(":")
            rule = f"finding/{kind.replace(' ', '-')}" if colon and kind in _FINDINGS else "finding"
            yield rule, f"{run.name}: {finding}", f"{run.name} {kind}", None


_FINDINGS = {"dead", "not finite", "never called", "no gradient", "experts without a gradient", "rounding"}


# --- GitLab -----------------------------------------------------------------------------------------------------------

_SEVERITIES = {"error": "major", "warning": "minor"}


def gitlab(results: Results) -> str:
    r"""Return a code quality report of what is wrong in the results of a run, see `issues`.

    >>> gitlab(Results(tests=()))
    '[]\n'
    """
    found = [
        {
            "description": f"{printable(issue.test)}: {issue.message}",
            "check_name": f"modelprobe/{issue.rule}",
            "fingerprint": issue.identity,
            "severity": _SEVERITIES[issue.level],
            "location": {"path": printable(issue.file), "lines": {"begin": issue.line}},
        }
        for issue in issues(results)
    ]
    return json.dumps(found, indent=1) + "\n"


# --- SARIF ------------------------------------------------------------------------------------------------------------

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(results: Results) -> str:
    """Return a SARIF log of what is wrong in the results of a run, see `issues`.

    >>> json.loads(sarif(Results(tests=())))["runs"][0]["results"]
    []
    """
    found = issues(results)
    rules = list(dict.fromkeys(issue.rule for issue in found))
    driver = {"name": "pytest-modelprobe", "rules": [{"id": rule} for rule in rules]}
    version = results.versions.get("pytest-modelprobe")
    if version:
        driver["version"] = version
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {"SRCROOT": {"description": {"text": "The root directory of pytest."}}},
        "results": [_result(issue, rules) for issue in found],
        "columnKind": "unicodeCodePoints",
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _result(issue: Issue, rules: list[str]) -> dict[str, Any]:
    location = {
        "artifactLocation": {"uri": quote(issue.file, errors="replace"), "uriBaseId": "SRCROOT"},
        "region": {"startLine": issue.line},
    }
    return {
        "ruleId": issue.rule,
        "ruleIndex": rules.index(issue.rule),
        "level": issue.level,
        "message": {"text": _plain(f"{printable(issue.test)}: {issue.message}")},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"modelprobe/v1": issue.identity},
    }


def _plain(text: str) -> str:
    """Return text for a message, in which ``[a](b)`` would be a link.

    >>> _plain("[a](https://b.example)")
    '[a] (https://b.example)'
    """
    return text.replace("](", "] (")

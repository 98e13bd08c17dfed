"""The results of a run as SARIF 2.1.0, the format of GitHub's code scanning and of editors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from pytest_modelprobe.text import printable

from .issues import Issue, issues

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render(results: Mapping[str, Any]) -> str:
    """Return a SARIF log of what is wrong in the results of a run, see `issues`.

    >>> json.loads(render({"tests": [], "versions": {"pytest-modelprobe": "1.0"}}))["runs"][0]["results"]
    []
    """
    found = issues(results)
    rules = list(dict.fromkeys(issue.rule for issue in found))
    driver = {"name": "pytest-modelprobe", "rules": [{"id": rule} for rule in rules]}
    version = results.get("versions", {}).get("pytest-modelprobe")
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

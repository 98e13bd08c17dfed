"""The results of a run as a code quality report of GitLab, which a merge request shows beside the code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pytest_modelprobe.text import printable

from .issues import issues

_SEVERITIES = {"error": "major", "warning": "minor"}


def render(results: Mapping[str, Any]) -> str:
    r"""Return a code quality report of what is wrong in the results of a run, see `issues`.

    >>> render({"tests": []})
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

"""What was compared with another side, in builtin types, for the results file and every report that is made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_modelprobe.revisions import Pair, SideBySide

_COUNTED = {
    "unchanged": "unchanged",
    "rounding": "rounding",
    "changed": "changed",
    "not repeatable": "not_repeatable",
    "not run": "not_run",
}
"""Verdict → the name of the number of its pairs."""


def pair_data(pair: Pair, side: str, root: Path) -> dict[str, Any]:
    """Return two records that were compared.

    Args:
        pair: The pair.
        side: The other side in one word, such as ``main``.
        root: The folder to which the files of classes are relative.
    """
    from pytest_modelprobe.comparison import text as comparison_text
    from pytest_modelprobe.revisions import tensors_lines
    from pytest_modelprobe.snapshot.causes import causes_data
    from pytest_modelprobe.text import json_number

    record, sources, diagnosis, first = pair.here.record, pair.here.sources, pair.diagnosis, pair.first
    changed = pair.verdict == "changed"
    parts = [comparison_text.text(diagnosis)] if changed else []
    if changed and pair.tensors is not None and first is not None:
        # The last line has the paths of files of this machine, and a report may be public.
        parts.append("\n".join(tensors_lines(pair.tensors, first.layer, side)[:-1]))
    text = "\n\n".join(parts)
    return {
        "record": pair.here.key,
        "verdict": pair.verdict,
        "device": record.device,
        "model": record.model,
        "layers": len(record.layers),
        "first_line": text.partition("\n")[0],
        "causes": causes_data(diagnosis.causes, record, root, sources) if changed else [],
        "possible": causes_data(diagnosis.possible, record, root, sources) if changed else [],
        "notes": causes_data(diagnosis.notes, record, root, sources),
        "moved": len(diagnosis.moved) if changed else 0,
        "text": text,
        "first": None
        if first is None
        else {
            "layer": first.layer,
            "layer_there": first.name_there,
            "call": first.call,
            "path": first.path,
            "change": json_number(first.change),
        },
    }


def base_data(
    found: SideBySide | None,
    *,
    ref: str | None,
    commit: str,
    python: str | None,
    said: str,
    stopped: str | None,
    only_there: list[str],
    versions: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """Return what was compared with the other side as a whole.

    Args:
        found: What was found, or `None` if nothing was compared.
        ref: The name of the commit as it was given.
        commit: Its hash, or an empty text.
        python: The interpreter as it was given.
        said: How many models are as they were, or why nothing was compared.
        stopped: Why nothing was compared.
        only_there: Tests that this side does not have.
        versions: The versions here and there, where they differ.
    """
    from pytest_modelprobe.revisions import SideBySide

    known = SideBySide() if found is None else found
    verdicts = Counter(pair.verdict for pair in known.pairs)
    return {
        "ref": ref,
        "commit": commit or None,
        "python": python,
        "said": said,
        "stopped": stopped,
        **{name: verdicts[verdict] for verdict, name in _COUNTED.items()},  # type: ignore[index]
        "unpaired": known.unpaired,
        "only_here": list(known.only_here),
        "only_there": only_there,
        "failed": {**known.ran.unread, **known.ran.failed},
        "versions": {name: list(pair) for name, pair in versions.items()},
    }

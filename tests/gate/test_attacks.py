"""The page of the gate: its verdicts are those of the gate, and it is up to date."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MADE = HERE.parents[1] / "docs" / "make_gate_page.py"
ATTACKS = runpy.run_path(str(HERE / "attacks.py"))
EACH = [attack for family in ATTACKS["FAMILIES"].values() for attack in family]


@pytest.mark.parametrize("attack", EACH, ids=[attack.what for attack in EACH])
def test_the_gate_says_what_the_page_says(attack: Any) -> None:
    assert ATTACKS["said"](attack) == attack.verdict


def test_the_page_is_up_to_date() -> None:
    make = runpy.run_path(str(MADE))
    assert make["PAGE"].read_text("utf-8") == make["page"](ATTACKS["FAMILIES"])

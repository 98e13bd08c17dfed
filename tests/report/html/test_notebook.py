"""`record.to_html()` and `record.show()`."""

from __future__ import annotations

import html
import sys
from types import SimpleNamespace

import pytest

from pytest_modelprobe.record import Layer, Record

RECORD = Record(model="Net", layers={"<b>": Layer(name="<b>", type="torch.nn.Linear")}, forwards=1)


def test_without_a_notebook_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    RECORD.show()
    assert capsys.readouterr().out == f"{RECORD}\n"


def test_a_shell_in_a_terminal_is_no_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    RECORD.show()
    assert capsys.readouterr().out.startswith("Net: ")


def test_in_a_notebook_the_page_is_in_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    display = SimpleNamespace(display=shown.append, HTML=str)
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=display)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    RECORD.show()
    (frame,) = shown
    assert html.unescape(frame.partition('srcdoc="')[2].partition('"')[0]) == RECORD.to_html()


def test_a_record_is_a_page_of_its_own() -> None:
    page = RECORD.to_html()
    assert page.startswith("<!doctype html>")
    assert "<h1>Net</h1>" in page
    assert "<b>\n" not in page

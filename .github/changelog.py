"""Cut a release's section in CHANGELOG.md, and print it.

python .github/changelog.py cut 1.2.0     # before the tag: Unreleased becomes the section of 1.2.0
python .github/changelog.py notes v1.2.0  # in the release workflow: prints that section, or fails without one
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"


def cut(text: str, version: str, date: datetime.date) -> str:
    """Return a changelog whose unreleased notes are those of a version, below an empty *Unreleased*."""
    if UNRELEASED not in text:
        raise ValueError("there is no section Unreleased")
    if not _notes(text, "Unreleased"):
        raise ValueError("Unreleased is empty: there is nothing to release")
    if _notes(text, version) is not None:
        raise ValueError(f"there is a section {version} already")
    return text.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {date.isoformat()}\n", 1)


def notes(text: str, version: str) -> str:
    """Return the notes of a version; a ValueError says what keeps it from being released."""
    found = _notes(text, version)
    if not found:
        raise ValueError(f"there are no notes for {version}: run `python .github/changelog.py cut {version}`")
    if _notes(text, "Unreleased"):
        raise ValueError("there are notes under Unreleased: cut them before the tag")
    return found


def _notes(text: str, name: str) -> str | None:
    """Return what is below a heading, up to the next; None where there is no such heading."""
    section = rf"^## \[{re.escape(name)}\][^\n]*\n(.*?)(?=^## \[|^\[[^\]]+\]: |\Z)"
    found = re.search(section, text, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else None


def main(arguments: list[str] | None = None) -> int:
    """Run the script and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["cut", "notes"])
    parser.add_argument("version", help="such as 1.2.0, or the tag v1.2.0", type=lambda tag: tag.removeprefix("v"))
    parser.add_argument("--file", type=Path, default=CHANGELOG)
    options = parser.parse_args(arguments)
    text = options.file.read_text("utf-8")
    try:
        if options.task == "notes":
            print(notes(text, options.version))
        else:
            today = datetime.datetime.now(datetime.UTC).date()
            options.file.write_text(cut(text, options.version, today), "utf-8")
    except ValueError as error:
        print(f"{options.file.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

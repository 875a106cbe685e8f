"""The messages that docs/troubleshooting.md quotes are those of the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path for path in (ROOT / "baton").iterdir() if path.is_dir())


def source() -> str:
    """The code of all packages, with string literals that continue on the next line joined."""
    text = "\n".join(path.read_text() for package in PACKAGES for path in package.resolve().rglob("*.py"))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_quoted_messages_exist() -> None:
    rows = re.findall(r"^\| (.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    messages = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row) if quote.count(" ") > 1]
    parts = {part.strip() for message in messages for part in message.split("…")} - {"", ":", "(", ")"}
    assert len(parts) > 30
    code = source()
    assert not [part for part in parts if part not in code]

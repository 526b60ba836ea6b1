"""The README's Python runs as written."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run_in_order() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["out"].shape == (1, 8, 64)  # type: ignore[attr-defined]


def test_files_that_the_readme_names_exist() -> None:
    text = README.read_text()
    named = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(
        r"`((?:tests|examples|docs|bench|cuda_src|cupaged)/[\w./]+)`", text
    )
    missing = [name for name in named if not name.startswith("http") and not (README.parent / name).exists()]
    assert not missing

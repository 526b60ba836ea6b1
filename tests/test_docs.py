"""README and docs/: examples run as written, links lead somewhere, what is generated is current, named tests exist.

A block of ```python runs, those of one file in order and in one namespace; ```python jax runs where JAX is installed; ```python cuda needs
a GPU and is compiled only.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import cupaged
from bench import readme_tables

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "tests/simt/README.md", *(ROOT / "docs").glob("*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def script(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_examples_run_in_order(page: Path) -> None:
    if page.match("simt/README.md"):
        pytest.skip("its example is a fragment: the arguments come from a test")
    names: dict[str, object] = {}
    has_jax = importlib.util.find_spec("jax") is not None
    for kind, runs in (("python", True), ("python jax", has_jax), ("python cuda", False)):
        for block in blocks(page, kind):
            code = compile(block, str(page), "exec")
            if runs:
                exec(code, names)
    if page.name == "README.md":
        assert len(blocks(page, "python")) >= 2 and names["out"].shape == (1, 8, 64)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_named_files_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    for name in re.findall(r"`((?:tests|examples|docs|bench|cuda_src|cupaged)/[\w./-]+)(?![\w./*-])", text):
        if not (ROOT / name).exists():
            missing.append(name)
    assert not missing


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings: lower case, words joined by hyphens, punctuation gone."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "least"), [("docs/numerics.md", 15), ("docs/allocator.md", 13)])
def test_every_line_of_a_contract_names_tests_that_exist(page: str, least: int) -> None:
    table = re.search(r"^\| \w+ \| held by \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE)
    assert table is not None
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table[1], re.MULTILINE)
    assert len(rows) >= least
    for line, held_by in rows:
        named = re.findall(r"`(tests/\w+\.py)::(\w+)`", held_by)
        assert named, line
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_the_api_reference_is_current_and_has_every_public_name() -> None:
    api = script("api")
    assert api.page() == api.OUT.read_text(), "run `make docs`"
    assert all(f"### {name}\n" in api.page() for name in cupaged.__all__)


def test_the_map_of_files_has_every_file_of_the_package_and_no_other() -> None:
    named = set(re.findall(r"`([\w*]+\.py)`", (ROOT / "docs/files.md").read_text()))
    files = [path.name for path in (ROOT / "cupaged").glob("*.py")]
    assert not [pattern for pattern in named if not fnmatch.filter(files, pattern)]
    assert not [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in named)]


def test_the_control_plane_imports_nothing_of_the_data_plane() -> None:
    page = (ROOT / "docs/files.md").read_text()
    of_control = page[page.index("## Control plane") : page.index("## Data plane")]
    shared = page[page.index("Both planes use") : page.index("`__init__.py`")]
    names = {name[:-3] for name in re.findall(r"`(\w+\.py)`", of_control + shared)}
    assert len(names) > 30
    for name in names:
        source = (ROOT / "cupaged" / f"{name}.py").read_text()
        assert names.issuperset(re.findall(r"^ *from \.(\w+) import", source, re.MULTILINE)), name
        assert not re.search(r"^ *(from \. import|import cupy|from cupy|import numba)", source, re.MULTILINE), name


def test_the_picture_shows_what_the_allocator_does() -> None:
    mapping = script("mapping")
    assert mapping.draw(mapping.scene()) == mapping.OUT.read_text(), "run `make docs`"


@pytest.mark.parametrize("page", readme_tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->") > 0
    assert readme_tables.rendered(text) == text, "run `make docs`"


def test_a_table_is_replaced_between_its_marks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(readme_tables.TABLES, "x", lambda: "new")
    before = "a\n<!-- table: x -->\nold\n\nolder\n<!-- end of table -->\nb\n"
    assert readme_tables.rendered(before) == "a\n<!-- table: x -->\nnew\n<!-- end of table -->\nb\n"
    with pytest.raises(KeyError):
        readme_tables.rendered("<!-- table: unknown -->\n<!-- end of table -->")

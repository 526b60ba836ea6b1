"""Writes `docs/api.md` from the docstrings: `python docs/api.py`. A test asserts that the file is current."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cupaged
from cupaged.plan import Plan

OUT = Path(__file__).with_name("api.md")
SECTIONS = ("Args:", "Returns:", "Raises:", "Attributes:", "Yields:")

# Names in the order in which a reader needs them; a test asserts that none of `cupaged.__all__` is missing.
CHAPTERS: dict[str, list[str]] = {
    "Control plane": ["BlockAllocator", "Group", "Step", "BlockPool", "OutOfBlocks", "TableMirror"],
    "Data plane": ["KVCache", "blocks_for"],
    "Arrays of your own": ["write_kv", "paged_attention", "plan", "Plan", "merge_states", "warmup"],
    "Modules": ["classic", "reference"],
}

MADE_ELSEWHERE = {"Step", "Plan", "OutOfBlocks"}  # nobody calls these classes but the package


def page() -> str:
    """The whole file."""
    parts = [
        "# API reference\n\nWritten from the docstrings by `python docs/api.py`; [concepts.md](concepts.md) has the words, "
        "[numerics.md](numerics.md) the contract.\n"
    ]
    named = [name for names in CHAPTERS.values() for name in names]
    chapters = {**CHAPTERS, "More": [name for name in cupaged.__all__ if name not in named]}
    for title, names in chapters.items():
        if names:
            parts.append(f"## {title}\n")
        for name in names:
            parts += entry(name, Plan if name == "Plan" else getattr(cupaged, name))
    return "\n".join(parts)


def entry(name: str, thing: Any) -> Iterator[str]:
    """One public name, with its methods or functions."""
    yield f"### {name}\n"
    if isinstance(thing, ModuleType):
        yield markdown(thing.__doc__)
        for member, function in vars(thing).items():
            if inspect.isfunction(function) and function.__module__ == thing.__name__ and not member.startswith("_"):
                yield f"#### {name}.{member}\n"
                yield signature(f"{name}.{member}", function)
                yield markdown(function.__doc__)
        return
    if name not in MADE_ELSEWHERE:
        yield signature(name, thing)
    yield markdown(thing.__doc__)
    if not inspect.isclass(thing):
        return
    if name not in MADE_ELSEWHERE and "__init__" in vars(thing) and thing.__init__.__doc__:
        yield markdown(thing.__init__.__doc__)
    for member, value in vars(thing).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property) and value.__doc__:
            yield f"#### {name}.{member}\n"
            yield markdown(value.__doc__)
        elif inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)):
            function = getattr(thing, member)
            if function.__doc__:
                yield f"#### {name}.{member}\n"
                yield signature(f"{name}.{member}", value)
                yield markdown(function.__doc__)


def signature(name: str, thing: Any) -> str:
    """Name and parameters, one a line where they do not fit one."""
    thing = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
    found = inspect.signature(thing)
    parameters = [
        p.replace(annotation=p.annotation if isinstance(p.annotation, str) else str(p.annotation))
        for p in found.parameters.values()
    ]
    words = [text(p) for p in parameters if p.name not in ("self", "cls")]
    star = next(
        (i for i, p in enumerate(p for p in parameters if p.name not in ("self", "cls")) if p.kind is p.KEYWORD_ONLY),
        None,
    )
    if star is not None and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        words.insert(star, "*")
    result = found.return_annotation
    arrow = "" if result is inspect.Signature.empty or inspect.isclass(thing) else f" -> {result}"
    line = f"{name}({', '.join(words)}){arrow}"
    if len(line) > 110:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){arrow}"
    return f"```python signature\n{line}\n```\n"


def text(parameter: inspect.Parameter) -> str:
    """One parameter as it stands in the source."""
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    shown = f"{star}{parameter.name}"
    if parameter.annotation and "_empty" not in str(parameter.annotation):
        shown += f": {parameter.annotation}"
    if parameter.default is not parameter.empty:
        shown += f" = {parameter.default!r}" if ":" in shown else f"={parameter.default!r}"
    return shown


def markdown(docstring: str | None) -> str:
    """A docstring with its sections as lists."""
    lines, out, section = inspect.cleandoc(docstring or "").splitlines(), [], False
    for line in lines:
        if line.strip() in SECTIONS and not line.startswith(" "):
            out += ["", f"**{line.strip()[:-1]}**", ""]
            section = True
        elif section and line.startswith("    "):
            item = re.match(r"    ([\w`*][\w`*, ]*): (.*)", line)
            if item and not line.startswith("     "):
                names = ", ".join(f"`{n.strip('`* ')}`" for n in item[1].split(","))
                out.append(f"- {names}: {item[2]}")
            else:
                out.append(("  " if out and out[-1].startswith(("-", "  ")) else "") + line.strip())
        else:
            section = section and not line.strip()
            out.append(line)
    return re.sub(r"\n{3,}", "\n\n", textwrap.dedent("\n".join(out))).strip() + "\n"


if __name__ == "__main__":
    OUT.write_text(page())
    print(OUT)

"""Figures of the benchmarks: one kind of row, one table for people, one file format that README's tables are made from.

A result file is JSON: what was run, when, on which machine, with which versions, and its rows. `save` writes it and the same as text
beside it; `latest` finds the newest one of a name.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure, less of which is better. `peer` and `limit` have its unit.

    The limit is what the figure may be (a budget) or cannot beat (the time of reading the same bytes): `of_limit` says which part of
    the limit's speed was reached, so a budget is kept from 1 upwards.
    """

    group: str  # control-plane, cpu-attention, gpu-attention, kernel-compile
    work: str  # unique within its group
    ours: float
    unit: str  # "ns/seq", "us", "B/block"
    peer: float | None = None
    limit: float | None = None
    more: dict[str, Any] = field(default_factory=dict)  # what else was measured: ready for JSON

    @property
    def ratio(self) -> float | None:
        """How many times as much the peer takes."""
        return None if self.peer is None else self.peer / self.ours

    @property
    def of_limit(self) -> float | None:
        """Part of the limit's speed that was reached."""
        return None if self.limit is None else self.limit / self.ours


def table(rows: Iterable[Row]) -> str:
    """The summary table: every group's rows under one head."""
    lines, group = [f"{'work':62} {'ours':>10} {'peer':>10} {'ratio':>7} {'limit':>10} {'of it':>6}  unit"], ""
    for row in rows:
        if row.group != group:
            group = row.group
            lines.append(group)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x" if row.ratio < 10 else f"{row.ratio:.0f}x"
        of_limit = "" if row.of_limit is None else f"{row.of_limit:.0%}"
        lines.append(
            f"  {row.work:60} {_figure(row.ours):>10} {_figure(row.peer):>10} {ratio:>7} {_figure(row.limit):>10} {of_limit:>6}  {row.unit}"
        )
    return "\n".join(lines)


def _figure(x: float | None) -> str:
    """Four digits, and never an exponent."""
    if x is None:
        return ""
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def machine() -> dict[str, Any]:
    """The processor, and what decides how fast it is."""
    found: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    except OSError:  # not Linux
        pass
    flags = set(found.get("flags", "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    vectors = [name for name in ("avx2", "avx512f", "amx_bf16") if name in flags]
    return {
        "processor": found.get("model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "vectors": vectors,
    }


def versions() -> dict[str, str]:
    """Versions of what is installed here."""
    from cupaged.info import versions as all_versions

    return {name: version for name, version in all_versions().items() if version}


def save(
    name: str,
    rows: Iterable[Row],
    command: str,
    text: str = "",
    notes: dict[str, Any] | None = None,
    folder: Path = FOLDER,
) -> Path:
    """Write `folder/NAME-DATE.json`, and the same for people as `.txt` (`text` in place of the summary table); returns the JSON's path.

    `command` repeats the run from the root of the repository; `notes` are facts of the run that machine and versions do not say, such
    as the peer's version.
    """
    rows = list(rows)
    content = {**describe(name, command), "notes": notes or {}, "rows": [asdict(row) for row in rows]}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{content['date']}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    head = f"# {command}\n# {conditions(content)}\n"
    path.with_suffix(".txt").write_text(head + (text or table(rows)).rstrip() + "\n")
    return path


def describe(name: str, command: str) -> dict[str, Any]:
    """What every result file says of its run."""
    return {
        "name": name,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "notes": {},
    }


def conditions(content: dict[str, Any]) -> str:
    """Date, machine, versions and notes of a result file on one line."""
    at = content["machine"]
    processor = f"{at['cores']} cores of {at['processor']} ({', '.join(at['vectors']) or 'no vector extension'})"
    packages = ", ".join(
        f"{name} {content['versions'][name]}" for name in ("python", "numpy", "numba") if name in content["versions"]
    )
    return ", ".join(
        [content["date"], processor, packages, *(f"{name} {value}" for name, value in content["notes"].items())]
    )


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """A result file and its rows."""
    content = json.loads(path.read_text())
    known = {f.name for f in fields(Row)}
    return content, [Row(**{name: value for name, value in row.items() if name in known}) for row in content["rows"]]


def of_each_machine(name: str, folder: Path = FOLDER) -> list[Path]:
    """The newest result file of a name from each processor, the newest first. Raises FileNotFoundError when there is none."""
    found: dict[str, tuple[str, Path]] = {}
    for path in folder.glob(f"{name}-[0-9][0-9][0-9][0-9]-*.json"):
        content = json.loads(path.read_text())
        processor = content["machine"]["processor"]
        found[processor] = max(found.get(processor, ("", path)), (content["date"], path))
    if not found:
        raise FileNotFoundError(f"no {name}-DATE.json in {folder}")
    by_name = sorted(found.values(), key=lambda one: one[1])
    return [path for _, path in sorted(by_name, key=lambda one: one[0], reverse=True)]


def latest(name: str, folder: Path = FOLDER) -> Path:
    """The newest result file of a name. Raises FileNotFoundError when there is none."""
    found = sorted(folder.glob(f"{name}-[0-9][0-9][0-9][0-9]-*.json"))
    if not found:
        raise FileNotFoundError(f"no {name}-DATE.json in {folder}")
    return found[-1]

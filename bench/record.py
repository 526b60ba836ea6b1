"""Runs a command and keeps what it prints as a result file, which README shows: `python -m bench.record demo make demo`

`bench/results/NAME-DATE.txt` begins with the command and the machine. Only the last SIZE lines are kept with `--last SIZE`. Standard error
is not kept. The exit status is the command's; a command that fails leaves no file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .results import FOLDER, conditions, describe


def record(name: str, command: list[str], last: int = 0, folder: Path = FOLDER) -> int:
    """Run `command`, print what it prints, keep it; returns its exit status."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if running.returncode == 0:
        program = "python" if command[0] == sys.executable else command[0]
        content = describe(name, " ".join([program, *command[1:]]))
        head = [f"# {content['command']}", f"# {conditions(content)}"]
        path = folder / f"{name}-{content['date']}.txt"
        path.write_text("\n".join(head + lines[-last or None :]) + "\n")
        print(f"kept in {path}", file=sys.stderr)
    return running.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--last", type=int, default=0, metavar="SIZE", help="keep the last lines only")
    parser.add_argument("name")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    sys.exit(record(options.name, options.command, options.last))

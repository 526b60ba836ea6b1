"""The command line: `python -m cupaged info | generate | serve | simulate | bench`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from . import __version__, info, simulate


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns 0, or 2 after one line on stderr for input that cannot be used.

    Where nobody reads on, as in `... | head -3`, and where the user interrupts, it ends quietly with the status that a shell expects.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter flushes into the pipe once more
        return 128 + 13  # SIGPIPE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + 2  # SIGINT


def _run(argv: list[str] | None) -> int:
    generate, serve = _example("generate"), _example("serve")
    parser = argparse.ArgumentParser(
        prog="cupaged", description="Paged KV cache and paged attention for NumPy and CuPy."
    )
    parser.add_argument("--version", action="version", version=f"cupaged {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    info_parser = commands.add_parser("info", help="what is installed, which backends run, what is missing")
    info_parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    generate.add_arguments(commands.add_parser("generate", help="text from a Llama model on the paged cache"))
    serve.add_arguments(commands.add_parser("serve", help="requests that come over time, in one batch that changes"))
    simulate.add_arguments(
        commands.add_parser("simulate", help="replay a request trace under several ways to manage memory")
    )
    commands.add_parser("bench", help="a few benchmarks of each kind that can run here, under a minute")
    args = parser.parse_args(argv)
    if args.command == "bench":
        return int(_bench().run(short=True))
    if args.command == "simulate":
        return simulate.run(args)
    if args.command == "serve":
        return int(serve.main(args))
    if args.command == "info":
        info.print_report(args.json)
        return 0
    return int(generate.main(args))


def _example(name: str) -> Any:
    """A module of the examples: inside the package in a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    folder = here / "examples" if (here / "examples").is_dir() else here.parent / "examples"
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def _bench() -> Any:
    """`bench/summary.py`: a part of the package in a wheel, a package beside it in a checkout."""
    here = Path(__file__).resolve().parent
    if (here / "bench").is_dir():
        return importlib.import_module("cupaged.bench.summary")
    if str(here.parent) not in sys.path:
        sys.path.insert(0, str(here.parent))
    return importlib.import_module("bench.summary")


if __name__ == "__main__":
    sys.exit(main())

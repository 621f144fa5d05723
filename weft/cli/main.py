"""The entry point of the `weft` command: `weft ps` at once, every other verb through `weft.cli.verbs.app`.

Typer takes 0.1 s to import and set up; `weft ps` is what people run all day. Whatever is not plainly one of its four
forms (`weft ps --help` for one) goes the usual way.
"""

from __future__ import annotations

import sys

from weft.cli.streams import prepare_streams

INTERRUPTED = 130  # as `weft.cli.exits` has it, which is not imported yet


def main() -> None:
    """Runs the command that is in sys.argv. Ctrl-C before a verb can answer it, while modules are imported, ends it."""
    prepare_streams()
    try:
        _run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _run() -> None:
    verb, options = sys.argv[1:2], sys.argv[2:]
    if verb == ["ps"] and {"--all", "--json"}.issuperset(options):
        from weft.cli.exits import guarded
        from weft.cli.verbs.job_list import list_jobs

        guarded(list_jobs)(finished="--all" in options, json="--json" in options)
        return
    from weft.cli.verbs.app import app
    from weft.cli.verbs.completion import PROGRAM, prepare_answers

    prepare_answers()
    app(prog_name=PROGRAM)

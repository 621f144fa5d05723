"""Writes what is made from the declared metrics: Grafana's boards, Prometheus's rules and alerts.

python -m weft.metrics.grafana --write observability    writes them
python -m weft.metrics.grafana --check observability    exits with 1 and names those that are not current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from weft.metrics.grafana.boards import files
from weft.metrics.grafana.queries import QueryError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m weft.metrics.grafana", description=(__doc__ or "").partition("\n")[0]
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="DIR", help="write the files below this directory")
    action.add_argument("--check", type=Path, metavar="DIR", help="only say which files there are not current")
    arguments = parser.parse_args()
    try:
        texts = files()
    except QueryError as error:
        print(f"weft.metrics.grafana: {error}", file=sys.stderr)
        return 1
    folder: Path = arguments.write or arguments.check
    stale = [path for path, text in texts.items() if not _is_current(folder / path, text)]
    if arguments.check is not None:
        if stale:
            print(
                f"not current: {', '.join(stale)}; run python -m weft.metrics.grafana --write {folder}", file=sys.stderr
            )
        return 1 if stale else 0
    for path in stale:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(texts[path], encoding="utf-8")
    return 0


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())

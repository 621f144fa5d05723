"""Queries: what a PromQL expression asks for, checked against what is declared.

Not a parser of PromQL, which promtool has: it finds the metrics that an expression selects, the labels that it matches
and those that it groups by. A board or a rule that names something that nobody exports would stay empty for ever; here
it is an error where it is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from weft.metrics.prometheus.declared import METRICS, MetricKind

# Prometheus makes these itself. The label job of its own series is the scrape's name, which is "weft".
OWN: Final[Mapping[str, frozenset[str]]] = {
    "up": frozenset({"instance", "job"}),
    "scrape_duration_seconds": frozenset({"instance", "job"}),
    "scrape_samples_scraped": frozenset({"instance", "job"}),
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "instance", "job"}),
}
GROUPINGS: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
OPERATORS: Final = frozenset({"and", "or", "unless", "bool", "offset", "group_left", "group_right"})

_TOKEN: Final = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\d[\w.]*)|(?P<name>[A-Za-z_:][\w:]*)"""
    r"""|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^<>=(){},]))"""
)


class QueryError(ValueError):
    """An expression that names what nobody exports, or that cannot be read. The text says what and where."""


def exported() -> dict[str, frozenset[str]]:
    """The labels of every series that a scrape brings, by its name; Prometheus adds `instance`."""
    families = dict(OWN)
    for metric in METRICS:
        labels = frozenset({*metric.labels, "instance"})
        if metric.kind is MetricKind.HISTOGRAM:
            families |= {f"{metric.name}_{part}": labels for part in ("sum", "count")}
            families[f"{metric.name}_bucket"] = labels | {"le"}
        else:
            families[metric.name] = labels
    return families


def check_query(expression: str, families: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The labels that its series may have. Errors: QueryError for a metric or a label that is not in `families`."""
    reader = _Reader(expression, families)
    reader.read()
    unknown = reader.grouped - reader.labels
    if unknown:
        raise QueryError(f"{expression!r} groups by {', '.join(sorted(unknown))}, which none of its metrics has")
    return frozenset(reader.labels)


class _Reader:
    def __init__(self, expression: str, families: Mapping[str, frozenset[str]]) -> None:
        self._expression = expression
        self._families = families
        self._tokens = [*_tokens(expression), ("end", "")]
        self._at = 0
        self.labels: set[str] = set()
        self.grouped: set[str] = set()

    def read(self) -> None:
        while (token := self._take())[0] != "end":
            kind, text = token
            opens = self._next() == "("
            if kind != "name":
                continue
            if text in GROUPINGS and opens:
                self.grouped |= set(self._names_until(")"))
            elif text not in OPERATORS and not opens and self._next() not in GROUPINGS:
                self._selector(text)

    def _selector(self, name: str) -> None:
        labels = self._families.get(name)
        if labels is None:
            raise QueryError(f"{self._expression!r} asks for {name}, which is not declared")
        self.labels |= labels
        if self._next() == "{":
            unknown = set(self._names_until("}")) - labels
            if unknown:
                raise QueryError(
                    f"{self._expression!r} matches {', '.join(sorted(unknown))}, which {name} does not have"
                )

    def _names_until(self, closing: str) -> Iterator[str]:
        while (token := self._take())[1] != closing:
            if token[0] == "end":
                raise QueryError(f"{self._expression!r} has no {closing} where one belongs")
            if token[0] == "name":
                yield token[1]

    def _take(self) -> tuple[str, str]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    at, expression = 0, expression.rstrip()
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise QueryError(f"{expression!r} cannot be read at {expression[at : at + 20]!r}")
        assert match.lastgroup is not None
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()

"""Grafana boards, made from the declared metrics: `python -m weft.metrics.grafana --write observability`."""

"""Writes the Grafana dashboard from the table of its panels.

python scripts/grafana.py           write docs/grafana/flowfabric.json
python scripts/grafana.py --check   change nothing; exit 1 if the file differs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parent.parent / "docs" / "grafana" / "flowfabric.json"
_WIDTH, _HEIGHT = 12, 8
_WINDOW = "[$__rate_interval]"


class Panel(NamedTuple):
    """A panel: its title, its unit, and what it draws: a query and the legend of its lines."""

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    text: str = ""


def _quantiles(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    labels = ", ".join(filter(None, ("le", by)))
    shown = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{_WINDOW})))", f"p{round(q * 100)}{shown}")
        for q in (0.5, 0.95, 0.99)
    )


def _p95(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    return ((f"histogram_quantile(0.95, sum by (le, {by}) (rate({metric}_bucket{_WINDOW})))", f"{{{{{by}}}}}"),)


def _rate(metric: str, *by: str) -> tuple[tuple[str, str], ...]:
    return ((f"sum by ({', '.join(by)}) (rate({metric}{_WINDOW}))", " ".join(f"{{{{{one}}}}}" for one in by)),)


def _gauge(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    # Every process of every server says the same about the database.
    return ((f"max by ({by}) ({metric})" if by else f"max({metric})", f"{{{{{by}}}}}" if by else metric),)


PANELS = (
    Panel("Claim latency by lane", "s", _quantiles("flowfabric_claim_seconds", "lane")),
    Panel("Claims by lane", "ops", _rate("flowfabric_claims_total", "lane", "result")),
    Panel("Lease renewals by outcome", "ops", _rate("flowfabric_renewals_total", "outcome")),
    Panel(
        "Workers at capacity",
        "percentunit",
        (("flowfabric_worker_running / flowfabric_worker_slots", "{{instance}}"),),
        "1: a worker has no free slot.",
    ),
    Panel(
        "Quota and budget denials",
        "ops",
        (
            (f"sum by (limit) (rate(flowfabric_quota_denials_total{_WINDOW}))", "quota: {{limit}}"),
            (f"sum by (dimension) (rate(flowfabric_budget_denials_total{_WINDOW}))", "budget: {{dimension}}"),
        ),
    ),
    Panel("Duration of duty rounds, p95", "s", _p95("flowfabric_duty_seconds", "duty")),
    Panel("Rounds of duties", "ops", _rate("flowfabric_duty_seconds_count", "duty", "outcome")),
    Panel("Cancel backlog", "short", _gauge("flowfabric_cancel_backlog_depth"), "Cancelled flows with members left."),
    Panel(
        "Requests by status class",
        "reqps",
        (
            (
                'sum by (class) (label_replace(rate(flowfabric_http_requests_total[$__rate_interval]), "class",'
                ' "${1}xx", "status", "(.).."))',
                "{{class}}",
            ),
        ),
    ),
    Panel("Duration of requests by path, p95", "s", _p95("flowfabric_http_request_seconds", "path")),
    Panel("Attempts by lane and outcome", "ops", _rate("flowfabric_attempts_total", "lane", "outcome")),
    Panel("End to end by lane", "s", _quantiles("flowfabric_end_to_end_seconds", "lane")),
    Panel("Waiting by lane", "short", _gauge("flowfabric_lane_depth", "lane")),
    Panel("Oldest waiting by lane", "s", _gauge("flowfabric_lane_oldest_seconds", "lane")),
    Panel("Executions by state", "short", _gauge("flowfabric_stored_executions", "state")),
    Panel("Blocked by reason", "short", _gauge("flowfabric_blocked", "reason")),
    Panel("Claims denied by limits", "ops", (
        (f"max by (reason, dimension) (rate(flowfabric_claims_denied_total{_WINDOW}))", "{{reason}} {{dimension}}"),
    ), "Executions that claims found under a closed limit, in the whole deployment."),
    Panel("Workers and slots", "short", (*_gauge("flowfabric_workers"), *_gauge("flowfabric_slots"))),
    Panel("Errors of engine calls", "ops", (
        (f'sum by (method, outcome) (rate(flowfabric_call_seconds_count{{outcome!="ok"}}{_WINDOW}))',
         "{{method}} {{outcome}}"),
    )),
    Panel("Refused for a limit", "reqps", _rate("flowfabric_http_refused_total", "reason")),
    Panel("Connections and streams", "short", (
        ("sum(flowfabric_http_connections)", "connections"),
        ("sum(flowfabric_http_in_flight)", "requests in flight"),
        ("sum(flowfabric_sse_clients)", "event streams"),
    )),
    Panel("Database reachable", "short", (("min(flowfabric_database_up)", "up"),)),
    Panel("Who leads the duties", "short", (
        ("max by (group, instance) (flowfabric_leads)", "{{group}} {{instance}}"),
    )),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "title": panel.title,
            "description": panel.text,
            "type": "timeseries",
            "datasource": source,
            "gridPos": {"x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [
                {"refId": chr(65 + place), "expr": query, "legendFormat": legend, "datasource": source}
                for place, (query, legend) in enumerate(panel.lines)
            ],
        }
        for number, panel in enumerate(PANELS)
    ]
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "FlowFabric — Operator Observability",
        "uid": "flowfabric-ops",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["flowfabric"],
        "templating": {"list": [variable]},
        "panels": panels,
    }


def main() -> int:
    """Write the file, or check it."""
    text = json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
    if "--check" in sys.argv:
        return 0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

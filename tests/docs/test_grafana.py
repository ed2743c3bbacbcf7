"""The Grafana dashboard: it is what its script writes, Grafana can import it, and every metric it draws exists."""

from __future__ import annotations

import json
import re
from typing import Any

from flowfabric.middleware import METRICS
from flowfabric.server.metrics import SERVER_METRICS, STORED_METRICS
from flowfabric.worker.health import WORKER_METRICS
from tests.docs.pages import ROOT, load

grafana = load(ROOT / "scripts" / "grafana.py", "grafana")

ALL = {**METRICS, **SERVER_METRICS, **STORED_METRICS, **WORKER_METRICS}
OF_REFERENCE = (
    *("Claim latency by lane", "Claims by lane", "Lease renewals by outcome", "Workers at capacity"),
    *("Quota and budget denials", "Duration of duty rounds, p95", "Rounds of duties", "Cancel backlog"),
    *("Requests by status class", "Duration of requests by path, p95", "Attempts by lane and outcome"),
)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(grafana.TARGET.read_text(encoding="utf-8"))
    return found


def test_the_file_is_what_the_script_writes() -> None:
    assert dashboard() == grafana.dashboard()


def test_grafana_can_import_it() -> None:
    found = dashboard()
    assert found["uid"] == "flowfabric-ops"
    assert found["title"]
    assert isinstance(found["schemaVersion"], int)
    assert found["refresh"] == "30s"
    (variable,) = found["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "timeseries"
        assert panel["targets"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert (place["x"], place["y"]) not in taken
        taken.add((place["x"], place["y"]))
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
    assert [panel["title"] for panel in panels[:11]] == list(OF_REFERENCE)
    assert len(panels) > 15


def test_every_metric_and_label_it_draws_exists() -> None:
    named: set[str] = set()
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            metrics = set()
            for word in re.findall(r"flowfabric_\w+", query):
                metric = re.sub(r"_(bucket|count|sum)$", "", word) if word not in ALL else word
                assert metric in ALL, word
                if word != metric:
                    assert ALL[metric].type == "histogram", word
                metrics.add(metric)
            labels = {label for metric in metrics for label in ALL[metric].labels}
            known = labels | {"le", "instance", "class"}
            for grouped in re.findall(r"by \(([^)]*)\)", query):
                assert {one.strip() for one in grouped.split(",")} <= known, query
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= known, query
            is_counter = any(ALL[metric].type == "counter" for metric in metrics)
            assert not is_counter or "rate(" in query, query
            named |= metrics
    assert len(named) > 20

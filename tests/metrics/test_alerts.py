"""The alert rules beside the dashboard: what they name is exported, and they fire when they should, as Prometheus itself says."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from exported_metrics import samples

RULES = Path(__file__).resolve().parents[2] / "deploy" / "alerts.yaml"
ALERTS = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
LABELS_OF_SCRAPES = {"instance"}
HERE = 'instance="a:1",model_name="tiny"'


def test_alerts_name_metrics_that_exist_with_labels_that_they_have():
    exported = samples()
    for rule in ALERTS:
        names = re.findall(r"headrace:\w+|\bprocess_\w+(?={)", rule["expr"])
        assert names, rule["alert"]
        labels = set(re.findall(r"(\w+) *(?:=~|!~|!=|=)\"", rule["expr"]))
        for group in re.findall(r"by \(([^)]+)\)", rule["expr"]):
            labels |= set(group.split(", "))
        has = {label for name in names for label in exported[name][0][0]}
        assert labels - has <= LABELS_OF_SCRAPES, rule["alert"]
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= labels, rule["alert"]


# Series over the minutes 0 to 40, in Prometheus' notation: with which the alert fires at minute 30, and with which it does not.
CASES = {
    "HeadraceGone": ({"headrace:build_info": "1x18 _x22"}, {"headrace:build_info": "1x40"}),
    "HeadraceNoTokens": (
        {
            "headrace:generation_tokens_total": "5+0x40",
            "headrace:num_running_reqs": "2x40",
            "headrace:num_queue_reqs": "0x40",
        },
        {
            "headrace:generation_tokens_total": "5+1x40",
            "headrace:num_running_reqs": "2x40",
            "headrace:num_queue_reqs": "0x40",
        },
    ),
    "HeadraceErrors": (
        {
            'headrace:http_requests_total{route="/generate",status="503"}': "0+1x40",
            'headrace:http_requests_total{route="/generate",status="200"}': "0+9x40",
        },
        {
            'headrace:http_requests_total{route="/health",status="503"}': "0+60x40",
            'headrace:http_requests_total{route="/generate",status="429"}': "0+9x40",
            'headrace:http_requests_total{route="/generate",status="500"}': "0+0x40",
        },
    ),
    "HeadraceQueueGrows": ({"headrace:num_queue_reqs": "0+2x40"}, {"headrace:num_queue_reqs": "80-1x40"}),
    "HeadraceKVFull": (
        {'headrace:token_usage{dp_rank="1"}': "0.99x40"},
        {'headrace:token_usage{dp_rank="1"}': "0.99x25 0.5x15"},
    ),
    "HeadraceRestarts": (
        {'headrace:restarts_total{process="scheduler"}': "_x25 1x15"},
        {'headrace:restarts_total{process="scheduler"}': "_x5 1x35"},
    ),
    "HeadraceStartsOften": (
        {'process_start_time_seconds{process="main"}': "100x10 200x10 300x20"},
        {'process_start_time_seconds{process="main"}': "100x15 200x25"},
    ),
}


def alerts_at_30m(alert: str, given: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    """What promtool says when no such alert is expected."""
    series = []
    for name, values in given.items():
        metric, _, labels = name.partition("{")
        series.append({"series": f"{metric}{{{HERE},{labels}" if labels else f"{metric}{{{HERE}}}", "values": values})
    expected = {"eval_time": "30m", "alertname": alert, "exp_alerts": []}
    test = {"interval": "1m", "input_series": series, "alert_rule_test": [expected]}
    path = folder / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    return subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_an_alert_fires_when_it_should_and_not_otherwise(alert, tmp_path):
    firing, quiet = (alerts_at_30m(alert, given, tmp_path) for given in CASES[alert])

    assert firing.returncode == 1
    assert f'alertname="{alert}"' in firing.stderr + firing.stdout
    assert quiet.returncode == 0, quiet.stderr + quiet.stdout

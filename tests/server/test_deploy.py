"""The dashboard shows every metric and no other; the deployed commands are valid."""

import json
import re
from pathlib import Path

from retain.cli.args import build_parser
from tests.server.conftest import HTTP

DEPLOY_FOLDER = Path(__file__).parents[2] / "deploy"
METRICS_NOT_ON_DASHBOARD = {
    "page_bytes",
    "tier_pages",
    "request_prompt_tokens",
    "request_generation_tokens",
    "prefix_eviction_idle_seconds",
    # These show the same as another panel.
    "pages",
    "request_time_per_output_token_seconds",
}


def test_dashboard_matches_metrics(tiny_server):
    HTTP.post(f"{tiny_server.url}/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 2})
    text = HTTP.get(f"{tiny_server.url.removesuffix('/v1')}/metrics").text
    exported = set(re.findall(r"^# TYPE retain_(\w+) (?:counter|gauge|histogram)", text, re.M))
    panels = json.loads((DEPLOY_FOLDER / "grafana.json").read_text())["panels"]
    shown = {m for p in panels for t in p.get("targets", ()) for m in re.findall(r"retain_(\w+)", t["expr"])}
    known = exported | {f"{m}_bucket" for m in exported}
    assert shown <= known, shown - known
    names = {m.removesuffix("_bucket") for m in shown}
    created = {m for m in exported if m.endswith("_created")}
    assert exported - names - created == METRICS_NOT_ON_DASHBOARD


def test_deployed_commands_parse():
    for name in ("retain.service", "Dockerfile"):
        command = re.search(r"bin/retain (serve .*)", (DEPLOY_FOLDER / name).read_text())[1]
        args = build_parser().parse_args(re.sub(r"\$\{?\w+\}?", "9", command.replace('"', "")).split())
        assert args.command == "serve" and args.tier[0].startswith("disk:")

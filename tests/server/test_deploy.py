"""The dashboard asks for what there is, and every metric is on it."""

import json
import re
from pathlib import Path

import httpx

DEPLOY_FOLDER = Path(__file__).parents[2] / "deploy"
METRICS_NOT_ON_DASHBOARD = {
    "page_bytes",
    "tier_pages",
    "request_prompt_tokens",
    "request_generation_tokens",
    "prefix_evicted_idle_seconds",
}
METRICS_NOT_ON_DASHBOARD |= {
    "pages",
    "request_time_per_output_token_seconds",
}  # the same as another panel, seen otherwise


def test_dashboard_matches_metrics(server):
    httpx.post(f"{server.url}/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 2}, timeout=120)
    text = httpx.get(f"{server.url.removesuffix('/v1')}/metrics").text
    there = set(re.findall(r"^# TYPE retain_(\w+) (?:counter|gauge|histogram)", text, re.M))
    panels = json.loads((DEPLOY_FOLDER / "grafana.json").read_text())["panels"]
    asked = {m for p in panels for t in p.get("targets", ()) for m in re.findall(r"retain_(\w+)", t["expr"])}
    known = there | {f"{m}_bucket" for m in there}
    assert asked <= known, asked - known
    bare = {m.removesuffix("_bucket") for m in asked}
    created = {m for m in there if m.endswith("_created")}
    assert there - bare - created == METRICS_NOT_ON_DASHBOARD


def test_deployed_commands_parse():
    """Options in the unit and the image are options of `retain serve`."""
    from retain.cli.args import build_parser

    for name in ("retain.service", "Dockerfile"):
        text = (DEPLOY_FOLDER / name).read_text()
        command = re.search(r"bin/retain (serve .*)", text)[1]
        args = build_parser().parse_args(re.sub(r"\$\{?\w+\}?", "9", command.replace('"', "")).split())
        assert args.command == "serve" and args.tier[0].startswith("disk:")

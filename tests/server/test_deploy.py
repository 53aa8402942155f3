"""The deployed commands and configurations are valid."""

import re
from pathlib import Path

import yaml

from retain.cli.args import build_parser
from retain.cli.cluster import build, parse_options
from retain.cluster.config import ClusterSettings

DEPLOY_FOLDER = Path(__file__).parents[2] / "deploy"


def test_deployed_commands_parse():
    for name in ("retain.service", "Dockerfile"):
        command = re.search(r"bin/retain (serve .*)", (DEPLOY_FOLDER / name).read_text())[1]
        args = build_parser().parse_args(re.sub(r"\$\{?\w+\}?", "9", command.replace('"', "")).split())
        assert args.command == "serve" and args.tier[0].startswith("disk:")


def test_the_checks_of_caches_that_others_run_parse():
    from cachecheck.checks import check_names
    from cachecheck.command import OneLineParser, add_arguments

    parser = OneLineParser()
    add_arguments(parser)
    action = yaml.safe_load((DEPLOY_FOLDER / "cachecheck" / "action.yml").read_text())
    install, run = (step["run"] for step in action["runs"]["steps"])
    assert (DEPLOY_FOLDER / "cachecheck" / install.split("PATH/")[1].strip('"') / "pyproject.toml").is_file()
    assert parser.parse_args(run.splitlines()[-1].split()[1:-1]).junit
    pod = yaml.safe_load((DEPLOY_FOLDER / "cachecheck" / "helm-test.yaml").read_text())
    args = parser.parse_args(pod["spec"]["containers"][0]["command"][1:])
    assert set(args.checks) <= set(check_names())


def check_serve_config(config: dict, environment: dict[str, str], monkeypatch) -> ClusterSettings:
    """Check a Ray Serve config by Ray's schema, build its application, and return what its arguments mean."""
    from ray.serve.schema import ServeDeploySchema  # only the worker that runs this imports Ray

    schema = ServeDeploySchema.model_validate(config)
    assert set(config) <= set(ServeDeploySchema.model_fields), "Ray ignores fields that it does not know"
    (application,) = schema.applications
    assert set(config["applications"][0]) <= set(type(application).model_fields)
    assert (application.import_path, application.route_prefix) == ("retain.cli.cluster:build", "/")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert build(application.args)
    return parse_options(application.args)


def test_cluster_file(monkeypatch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann sk-ann-0123456789\n")
    keys.chmod(0o600)
    text = (DEPLOY_FOLDER / "cluster.yaml").read_text().replace("/etc/retain/keys", str(keys))
    settings = check_serve_config(yaml.safe_load(text), {}, monkeypatch)
    assert settings.server.api_keys and settings.cluster.replicas_per_machine == 1


def test_kuberay_manifest(monkeypatch):
    manifest = yaml.safe_load((DEPLOY_FOLDER / "rayservice.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all({"rayStartParams", "template"} <= set(group) for group in groups)
    pods = [group["template"]["spec"] for group in groups]
    environment = {e["name"]: e.get("value") for pod in pods for c in pod["containers"] for e in c["env"]}
    assert environment == {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RETAIN_API_KEYS": None,
    }
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    settings = check_serve_config(config, {"RETAIN_API_KEYS": "me:sk-something-long"}, monkeypatch)
    (deployment,) = config["applications"][0]["deployments"]
    workers, limits = cluster["workerGroupSpecs"][0], deployment["autoscaling_config"]
    assert deployment["name"] == "replica"
    assert (workers["minReplicas"], workers["maxReplicas"]) == (limits["min_replicas"], limits["max_replicas"])
    assert pods[1]["terminationGracePeriodSeconds"] >= settings.graceful_shutdown_s
    oldest = re.search(r"ray\[serve\]>=([\d.]+)", (DEPLOY_FOLDER.parent / "pyproject.toml").read_text())
    assert oldest and cluster["rayVersion"].startswith(oldest[1])

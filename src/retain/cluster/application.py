"""The Ray Serve application: the deployment of replicas, and of the ingress where there is one."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from retain.cluster.config import ClusterSettings
from retain.cluster.ingress import Ingress
from retain.cluster.replica import ForwardedReplica, HttpReplica
from retain.cluster.router import AffinityRouter

HEALTH_CHECK_PERIOD_S = 5.0


def build_application(settings: ClusterSettings) -> Application:
    """Build the application.

    With `session` Ray's HTTP proxy sends requests to a replica in one hop: their header is all that it sees. With
    `prefix` an ingress reads the text first.
    """
    by_session = settings.cluster.affinity == "session"
    replica = serve.deployment(
        name="replica",
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.cluster.cpus, "num_gpus": settings.cluster.gpus},
        request_router_config=_router(settings),
        max_constructor_retry_count=1,  # a wrong option stays wrong
        **_replica_count(settings),
        **_lifetime(settings),
    )(HttpReplica if by_session else ForwardedReplica).bind(settings)
    if by_session:
        return replica
    return serve.deployment(
        name="ingress",
        max_ongoing_requests=settings.max_ongoing_requests * settings.cluster.num_replicas_at_most,
        ray_actor_options={"num_cpus": 0},
        **_lifetime(settings),
    )(Ingress).bind(settings, replica)


def _router(settings: ClusterSettings) -> RequestRouterConfig:
    options: dict[str, Any] = {  # Ray's annotations do not allow a class
        "request_router_class": AffinityRouter,
        "request_router_kwargs": {"spread": settings.affinity_spread},
    }
    return RequestRouterConfig(**options)


def _replica_count(settings: ClusterSettings) -> dict[str, Any]:
    cluster = settings.cluster
    place = {"max_replicas_per_node": cluster.replicas_per_machine} if cluster.replicas_per_machine else {}
    if cluster.max_replicas is None:
        return {**place, "num_replicas": cluster.replicas}
    return {
        **place,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=cluster.num_replicas_at_least,
            initial_replicas=cluster.replicas,
            max_replicas=cluster.max_replicas,
            target_ongoing_requests=settings.target_ongoing_requests,
        ),
    }


def _lifetime(settings: ClusterSettings) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": settings.graceful_shutdown_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "logging_config": {"enable_access_log": False, "log_level": "WARNING"},
    }

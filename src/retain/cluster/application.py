"""The Ray Serve application: the deployment of replicas, and the one of their router."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from retain.cluster.config import ClusterSettings
from retain.cluster.replica import Replica
from retain.cluster.router import Router

HEALTH_CHECK_PERIOD_S = 5.0


def build_application(settings: ClusterSettings) -> Application:
    """Build the application: the replicas, to which HAProxy sends requests, and the router that it asks where to."""
    replica = serve.deployment(
        name="replica",
        max_ongoing_requests=settings.max_ongoing_requests,
        ray_actor_options={"num_cpus": settings.cluster.cpus, "num_gpus": settings.cluster.gpus},
        max_constructor_retry_count=1,  # a wrong option stays wrong
        **_replica_count(settings),
        **_lifetime(settings),
    )(Replica).bind(settings)
    router = serve.deployment(
        name="router",
        max_ongoing_requests=settings.max_ongoing_requests * settings.cluster.num_replicas_at_most,
        ray_actor_options={"num_cpus": 0},
        max_constructor_retry_count=1,
        **_lifetime(settings),
    )(Router).bind(settings, replica)
    # Ray's own name for this is private, but Ray's version is fixed in our requirements.
    return replica._with_ingress_request_router(router)


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

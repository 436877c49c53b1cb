"""Offramp on Ray Serve: each replica is one whole server, its app and its engine, behind Ray's proxies.

``serve run deploy/ray/serve.yaml``; docs/operations.md says the rest.
"""

from typing import Any

import prometheus_client
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deploy.ray.targets import Targets
from server.app import create_app, load_bundles
from server.config import Settings, load_settings
from server.cpus import split_cpus
from server.logs import configure_logging


def build(flags: dict[str, Any]) -> Application:
    """The application of a configuration's ``args``, which are settings of ``server.config`` by name.

    Raises ``StartError`` where one is wrong, so that it shows when the configuration is deployed and not in a replica
    that never gets ready. What ``args`` leaves open comes from each replica's own environment (``OFFRAMP_API_KEY``).
    """
    load_settings(**flags)
    targets = serve.deployment(Targets).options(ray_actor_options={"num_cpus": 0}).bind()
    return Offramp.bind(flags, targets)


@serve.deployment
@serve.ingress()
class Offramp:
    """One replica. Ray replaces it when its health check raises, and drains it before it ends it."""

    def __init__(self, flags: dict[str, Any], targets: DeploymentHandle) -> None:
        settings = settings_of_replica(load_settings(**flags))
        configure_logging(settings.log_level, settings.log_format)
        self._app = create_app(settings, load_bundles(settings))
        self._catalog = self._app.state.catalog
        self._targets = targets
        self._replica = serve.get_replica_context().replica_id.unique_id
        # The proxies hand each request to any one replica, a scrape too; so each has a port that is its own.
        server, _ = prometheus_client.start_http_server(0, "0.0.0.0", registry=self._app.state.metrics.registry)
        self._address = f"{ray.util.get_node_ip_address()}:{server.server_port}"

        async def get_targets(request: Request) -> Response:
            return JSONResponse(await self._targets.document.remote())

        self._app.router.add_route("/metrics/targets", get_targets)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Raises where a worker of an engine has died. Ray calls it every ``health_check_period_s``."""
        if not self._catalog.alive:
            raise RuntimeError("a worker has died")
        self._targets.seen.remote(self._replica, self._address)


def settings_of_replica(settings: Settings) -> Settings:
    """``settings`` fitted to the CPUs that Ray counts for the replica, which it does not keep a process from exceeding.

    ``/metrics`` leaves the app: it has its own port.
    """
    cpus = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
    workers, threads = split_cpus(cpus, settings.workers, settings.threads)
    fitted = {"workers": workers, "threads": threads, "lone_threads": settings.lone_threads or cpus, "metrics_port": 0}
    return settings.model_copy(update=fitted)

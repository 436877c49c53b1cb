"""Offramp on Ray Serve: each replica is one whole server, its app and its engine, behind Ray's proxies.

``serve run deploy/ray/serve.yaml``; docs/operations.md says the rest.
"""

from typing import Any

import prometheus_client
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deploy.ray.targets import Targets
from server.app import create_app
from server.config import Settings, load_bundles, load_settings
from server.logs import configure_logging
from server.machine import most_lone_threads, split_cpus


class Replica:
    """One replica. Ray replaces it when its health check raises, and lets it finish its requests before it ends it."""

    def __init__(self, flags: dict[str, Any], targets: DeploymentHandle) -> None:
        settings = fitted(load_settings(**flags), _cpus())
        configure_logging(settings.log_level, settings.log_format)
        self._served = create_app(settings, load_bundles(settings))
        self._targets = targets
        self._name = serve.get_replica_context().replica_id.unique_id
        # A proxy hands each request to any one replica, a scrape too; so the metrics of each have a port of their own.
        server, _ = prometheus_client.start_http_server(0, "0.0.0.0", registry=self._served.state.metrics.registry)
        self._address = f"{ray.util.get_node_ip_address()}:{server.server_port}"
        self._served.router.add_route("/metrics/targets", self._get_targets)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._served

    async def check_health(self) -> None:
        """Raises where a worker of an engine has died. Ray calls it every ``health_check_period_s``."""
        if not self._served.state.catalog.alive:
            raise RuntimeError("a worker has died")
        self._targets.seen.remote(self._name, self._address)

    async def _get_targets(self, request: Request) -> Response:
        return JSONResponse(await self._targets.document.remote())


Offramp = serve.deployment(name="Offramp")(serve.ingress()(Replica))


def build(flags: dict[str, Any]) -> Application:
    """The application of a configuration's ``args``, which are settings of ``server.config`` by name.

    Raises ``StartError`` where one is wrong: it shows when the configuration is deployed, and not as a replica that
    never gets ready. What ``args`` leaves open comes from each replica's own environment (``OFFRAMP_API_KEY``).
    """
    return application(Offramp, flags)


def application(deployment: Deployment, flags: dict[str, Any]) -> Application:
    """``deployment`` of a :class:`Replica` with its settings and its list of scrape targets."""
    load_settings(**flags)
    # It costs nothing, and what it is told every few seconds is not worth a line each.
    quiet = {"ray_actor_options": {"num_cpus": 0}, "logging_config": {"enable_access_log": False}}
    targets = serve.deployment(name="Targets", **quiet)(Targets)
    return deployment.bind(flags, targets.bind())


def fitted(settings: Settings, cpus: int) -> Settings:
    """``settings`` for a replica that Ray counts ``cpus`` CPUs for: Ray counts, but keeps no process from using more.

    ``/metrics`` leaves the app: a replica has its own port for it. So does ``/admin``: through Ray's proxy a reload
    would reach one replica, and nobody knows which.
    """
    runs, threads = split_cpus(cpus, settings.runs, settings.threads)
    lone_threads = settings.lone_threads or max(threads, most_lone_threads(cpus))
    fit = {
        "workers": 1,
        "runs": runs,
        "threads": threads,
        "lone_threads": lone_threads,
        "metrics_port": 0,
        "admin": "off",
    }
    return settings.model_copy(update=fit)


def _cpus() -> int:
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))

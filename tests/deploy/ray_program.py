"""Ray Serve with one configuration file, as ``serve run`` runs it, in a small cluster that ends with this process.

``python -m tests.deploy.ray_program CONFIG METRICS_PORT`` until SIGINT. Its replicas can be broken: POST /break.
"""

import sys
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve._private import api
from ray.serve.scripts import cli
from starlette.requests import Request
from starlette.responses import Response

from deploy.ray.app import Replica, application


class Breakable(Replica):
    def __serve_build_asgi_app__(self) -> FastAPI:
        async def break_engine(request: Request) -> Response:
            self._served.state.catalog.default.engine._break()
            return Response(status_code=204)

        self._served.router.add_route("/break", break_engine, methods=["POST"])
        return self._served


def build(flags: dict[str, Any]) -> Application:
    return application(serve.deployment(name="Offramp")(serve.ingress()(Breakable)), flags)


if __name__ == "__main__":
    _, config, metrics_port = sys.argv
    ray.init(
        num_cpus=2,
        object_store_memory=80 * 1024 * 1024,
        include_dashboard=False,
        namespace="serve",
        _metrics_export_port=int(metrics_port),
    )
    # So long Serve waits for its proxy, and no setting of its own changes that: too short for a busy machine.
    api.HTTP_PROXY_TIMEOUT = 600
    try:
        cli(["run", config], standalone_mode=False)
    finally:
        ray.shutdown()

"""Ray Serve with our configuration: the proxy's errors, and a real cluster of two replicas that loses one.

The cluster runs in an environment of its own, which `make ray` makes: Ray is large.
"""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.peers.process import free_port
from deploy.ray.proxy import middlewares
from deploy.ray.targets import KEEP_SECONDS, Targets
from models.bundle import Bundle
from server.config import load_settings
from tests.server.conftest import error_of, some_texts

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "deploy" / "ray").glob("*.yaml"))
PYTHON = Path(os.environ.get("RAY_PYTHON", ROOT / ".venv-ray" / "bin" / "python"))


def _deployment(config: dict[str, Any], name: str) -> dict[str, Any]:
    (application,) = config["applications"]
    (found,) = [deployment for deployment in application["deployments"] if deployment["name"] == name]
    return found


def _wrapped(app: ASGIApp) -> httpx.AsyncClient:
    (middleware,) = middlewares()
    transport = httpx.ASGITransport(middleware.cls(app, *middleware.args, **middleware.kwargs))
    return httpx.AsyncClient(transport=transport, base_url="http://proxy")


@pytest.mark.parametrize(
    ("rays", "status", "type"),
    [
        (404, 404, "not_found"),
        (408, 504, "deadline"),
        (429, 429, "overloaded"),
        (503, 503, "not_ready"),
    ],
)
async def test_what_the_proxy_refuses_by_itself_is_in_our_shape(rays: int, status: int, type: str) -> None:
    async with _wrapped(PlainTextResponse("Ray's words", rays, {"x-request-id": "7"})) as client:
        answer = await client.post("/classify", json={"inputs": "a film"})
    assert answer.status_code == status
    assert error_of(answer)["type"] == type
    assert answer.headers["x-request-id"] == "7"
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)


async def test_other_doors_get_their_own_shapes() -> None:
    async with _wrapped(PlainTextResponse("Ray's words", 503)) as client:
        assert set((await client.post("/predict", json={})).json()) == {"error", "error_type"}


async def test_when_ray_says_how_long_to_wait_clients_are_told() -> None:
    async with _wrapped(PlainTextResponse("Ray's words", 429, {"retry-after": "5"})) as client:
        assert (await client.post("/classify")).headers["retry-after"] == "5"


async def test_a_request_whose_replica_died_gets_503_and_may_be_sent_again() -> None:
    async def silence(scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = [*scope["headers"], (b"x-request-id", b"7")]

    async with _wrapped(silence) as client:
        answer = await client.post("/classify", json={"inputs": "a film"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-request-id"] == "7"
    assert "again" in error_of(answer)["message"]


@pytest.mark.parametrize("status", [200, 408, 422, 429, 503])
async def test_what_a_replica_answers_passes_as_it_is_but_for_the_second_id(status: int) -> None:
    async def replica(scope: Scope, receive: Receive, send: Send) -> None:
        response = JSONResponse({"its": "own"}, status, {"x-request-id": "7", "retry-after": "3"})
        response.raw_headers.append((b"X-Request-ID", b"7"))
        await response(scope, receive, send)

    async with _wrapped(replica) as client:
        answer = await client.post("/classify")
    assert (answer.status_code, answer.json()) == (status, {"its": "own"})
    assert answer.headers.get_list("x-request-id") == ["7"]
    assert answer.headers["retry-after"] == "3"


async def test_the_proxys_own_routes_stay_as_they_are() -> None:
    async with _wrapped(PlainTextResponse("draining", 503)) as client:
        assert (await client.get("/-/healthz")).text == "draining"


async def test_a_replica_that_has_fallen_silent_is_no_target_any_more() -> None:
    now = 0.0
    targets = Targets(clock=lambda: now)
    await targets.seen("a", "10.0.0.1:4000")
    await targets.seen("b", "10.0.0.2:4000")
    now = KEEP_SECONDS
    await targets.seen("b", "10.0.0.2:4000")
    assert [group["labels"]["replica"] for group in await targets.document()] == ["a", "b"]
    now += 1
    assert await targets.document() == [{"targets": ["10.0.0.2:4000"], "labels": {"replica": "b"}}]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configurations_numbers_fit_each_other_and_the_server(path: Path) -> None:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    (application,) = config["applications"]
    settings = load_settings(**application["args"])
    replica = _deployment(config, "Offramp")
    # So that refusals are the replica's, in our shape and with its own Retry-After.
    assert replica["max_ongoing_requests"] > settings.max_concurrent_requests
    assert replica["graceful_shutdown_timeout_s"] >= config["http_options"]["request_timeout_s"]
    # A replica is not forgotten while it is only slow to be asked.
    assert replica["health_check_period_s"] * 3 < KEEP_SECONDS
    assert replica["autoscaling_config"]["min_replicas"] >= 2


class Cluster:
    """A running ``tests.deploy.ray_program``."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str, ray_metrics: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.ray_metrics = ray_metrics
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=60)

    def targets(self) -> dict[str, str]:
        """Addresses of metrics by replica; none while there is no replica to ask."""
        try:
            answer = self.client.get("/metrics/targets")
        except httpx.TransportError:
            return {}
        if answer.status_code != 200:
            return {}
        return {group["labels"]["replica"]: group["targets"][0] for group in answer.json()}

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 900) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, f"{what}\n{self.log.read_text()[-8000:]}"
            time.sleep(0.5)

    def replicas(self) -> list[int]:
        """Process ids of the replicas, of this cluster and no other."""
        parents = {}
        names = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                stat, name = (folder / "stat").read_text(), (folder / "cmdline").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            names[int(folder.name)] = name

        def ours(pid: int) -> bool:
            while pid > 1 and pid != self.process.pid:
                pid = parents.get(pid, 0)
            return pid == self.process.pid

        return [
            pid for pid, name in names.items() if name.startswith("ray::ServeReplica:offramp:Offramp") and ours(pid)
        ]


@pytest.fixture(scope="module")
def cluster(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The committed configuration with a tiny bundle, a free port, and replicas that can be broken."""
    if not PYTHON.exists():
        pytest.skip("Ray is not installed: make ray")
    folder = tmp_path_factory.mktemp("ray")
    config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text(encoding="utf-8"))
    port, metrics_port = free_port(), free_port()
    # A busy machine may stand still for a minute.
    config["http_options"] |= {"host": "127.0.0.1", "port": port, "request_timeout_s": 600}
    (application,) = config["applications"]
    application["import_path"] = "tests.deploy.ray_program:build"
    application["args"] |= {"bundles": [str(tiny_bundle.path)], "measure_seconds": 0}
    _deployment(config, "Offramp")["autoscaling_config"]["max_replicas"] = 2
    (folder / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OFFRAMP_", "RAY_"))}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.ray.proxy:middlewares",
        # On a busy machine a process takes minutes to start; Ray gives up on workers after 60 s, on its proxy after 20.
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    }
    command = [PYTHON, "-m", "tests.deploy.ray_program", folder / "serve.yaml", str(metrics_port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    running = Cluster(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics", folder / "log")
    try:
        running.wait("two replicas", lambda: len(running.targets()) == 2)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        finally:
            process.kill()


def _requests(page: str) -> float:
    found = re.findall(r'^offramp_requests_total\{code="200",.*route="/classify"\} (\S+)$', page, re.MULTILINE)
    return sum(float(value) for value in found)


def test_both_replicas_answer_and_both_are_scraped(cluster: Cluster) -> None:
    before = {name: _requests(httpx.get(f"http://{at}/metrics").text) for name, at in cluster.targets().items()}
    for text in some_texts(60):
        answer = cluster.client.post("/classify", json={"inputs": text})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get_list("x-request-id") != []
    after = {name: _requests(httpx.get(f"http://{at}/metrics").text) for name, at in cluster.targets().items()}
    gained = [after[name] - before[name] for name in before]
    assert sum(gained) == 60
    assert min(gained) > 0
    # A page of one replica at random would be no use to anybody.
    assert cluster.client.get("/metrics").status_code == 404


def test_rays_metrics_know_the_replicas_by_the_same_names(cluster: Cluster) -> None:
    names = set(cluster.targets())

    def known() -> set[str]:
        page = httpx.get(cluster.ray_metrics, timeout=30).text
        return set(re.findall(r'^ray_serve_deployment_\w+\{.*replica="(\w+)"', page, re.MULTILINE))

    cluster.wait("replicas in Ray's metrics", lambda: names <= known())


def test_mistakes_and_refusals_are_in_our_shape(cluster: Cluster) -> None:
    answer = cluster.client.post("/classify", json={"inputs": "a film", "qualty": 1})
    assert (answer.status_code, error_of(answer)["param"]) == (422, "qualty")
    assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]


async def test_killing_a_replica_loses_only_what_it_had_and_a_retry_succeeds(cluster: Cluster) -> None:
    clients, each = 8, 20
    before, texts = set(cluster.targets()), some_texts(16, seed=3)
    outcomes: Counter[int] = Counter()
    errors: list[httpx.Response] = []
    under_way = asyncio.Event()

    async def client(http: httpx.AsyncClient) -> None:
        for _ in range(each):
            while True:
                answer = await http.post("/classify", json={"inputs": texts, "quality": 1.0})
                outcomes[answer.status_code] += 1
                if outcomes[200] == clients * 4:
                    under_way.set()
                if answer.status_code == 200:
                    break
                errors.append(answer)
                await asyncio.sleep(float(answer.headers["retry-after"]))

    async with httpx.AsyncClient(base_url=cluster.url, timeout=600) as http:
        asked = [asyncio.ensure_future(client(http)) for _ in range(clients)]
        await under_way.wait()
        os.kill(cluster.replicas()[0], signal.SIGKILL)
        await asyncio.gather(*asked)
    assert outcomes[200] == clients * each
    # Each client has one request under way.
    assert 0 < len(errors) <= clients
    assert {answer.status_code for answer in errors} == {503}
    assert {error_of(answer)["type"] for answer in errors} == {"not_ready"}
    await asyncio.to_thread(
        cluster.wait, "a new replica", lambda: len(now := set(cluster.targets())) == 2 and now != before
    )


def test_a_replica_with_a_broken_engine_is_replaced(cluster: Cluster) -> None:
    before = set(cluster.targets())
    assert cluster.client.post("/break").status_code == 204
    cluster.wait("a new replica", lambda: len(now := set(cluster.targets())) == 2 and now != before)
    answers = [cluster.client.post("/classify", json={"inputs": text}).status_code for text in some_texts(20)]
    assert answers == [200] * 20


def test_a_cluster_that_is_told_to_end_leaves_no_process(cluster: Cluster) -> None:
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(300) == 0
    assert cluster.replicas() == []

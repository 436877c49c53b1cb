"""A model is loaded anew while it serves: what changes, what goes on, and what is refused."""

import asyncio
import gc
import os
import shutil
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from models.architecture import ExitSpec
from models.bundle import Bundle
from server.catalog import ServedModel
from server.engine.runner import Runner
from server.reload import OnceMore, ReloadError
from tests.server.conftest import Served, error_of, eventually, samples, serving
from tests.server.process import Process, ask, classify, metric, process, until
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.anyio

ENGLISH, GERMAN = ("negative", "positive"), ("schlecht", "gut")
ROUTE = "/admin/models/tiny/reload"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Versions of one model: other labels and weights in 2, two exits fewer in 3, 4 has another name."""
    folder = tmp_path_factory.mktemp("versions")
    fewer = (ExitSpec(number=1, after_layer=1, head="mean"), ExitSpec(number=2, after_layer=4, head="cls"))
    return {
        "1": write_tiny_bundle(folder / "1", labels=ENGLISH),
        "2": write_tiny_bundle(folder / "2", version="2", labels=GERMAN, seed=7),
        "3": write_tiny_bundle(folder / "3", version="3", exits=fewer),
        "4": write_tiny_bundle(folder / "4", version="4", name="other"),
    }


class Link:
    """A symbolic link to a version, which can be turned to another in one step."""

    def __init__(self, path: Path, versions: dict[str, Bundle]) -> None:
        self.path, self._versions = path, versions
        self.turn_to("1")

    def turn_to(self, version: str | Path) -> None:
        target = version if isinstance(version, Path) else self._versions[version].path
        new = self.path.with_suffix(".new")
        new.symlink_to(target)
        os.replace(new, self.path)

    @property
    def bundle(self) -> Bundle:
        return Bundle.load(self.path)


@pytest.fixture
def link(tmp_path: Path, versions: dict[str, Bundle]) -> Link:
    return Link(tmp_path / "current", versions)


def spoiled(bundle: Bundle, folder: Path) -> Path:
    """A copy of ``bundle`` with a changed graph."""
    copy = folder / "spoiled"
    shutil.copytree(bundle.path, copy)
    graph = copy / bundle.graph(2).relative_to(bundle.path)
    content = bytearray(graph.read_bytes())
    content[100] ^= 1
    graph.write_bytes(content)
    return copy


async def test_a_reload_says_both_versions_and_answers_come_from_the_new_one(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        before = (await served.classify("a good film")).json()
        link.turn_to("2")
        reloaded = await served.client.post(ROUTE)
        assert reloaded.status_code == 200
        assert reloaded.json() == {"model": "tiny", "old_version": "1", "new_version": "2"}
        after = (await served.classify("a good film")).json()
        assert (before["version"], after["version"]) == ("1", "2")
        assert before["results"][0]["label"] in ENGLISH
        assert after["results"][0]["label"] in GERMAN
        (model,) = (await served.client.get("/models")).json()["models"]
        assert (model["version"], model["labels"], model["default"]) == ("2", list(GERMAN), True)


async def test_gauges_are_the_new_versions_and_counters_go_on(link: Link) -> None:
    def series(served: Served, name: str, label: str) -> set[str]:
        found = samples(served.metrics.registry)
        return {dict(labels)[label] for key, labels in found if key == f"offramp_{name}"}

    async with serving(link.bundle, admin="open") as served:
        await served.results("a good film", quality=1.0)
        assert series(served, "queue_depth", "segment") == {"1", "2", "3", "4"}
        link.turn_to("3")
        assert (await served.client.post(ROUTE)).status_code == 200
        assert series(served, "model_info", "version") == {"3"}
        assert series(served, "queue_depth", "segment") == {"1", "2"}
        assert series(served, "calibrated_exit_share", "exit") == {"1", "2"}
        await served.results("a good film", quality=1.0)
        found = samples(served.metrics.registry)
        assert found["offramp_tier_total", (("model", "tiny"), ("tier", "1"))] == 2
        assert found["offramp_model_reloads_total", (("model", "tiny"), ("outcome", "success"))] == 1


async def test_the_gauge_of_a_queue_reads_the_new_engine(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        link.turn_to("2")
        await served.client.post(ROUTE)
        served.catalog.default.engine._scheduler.depth = lambda segment: 10 + segment  # type: ignore[method-assign]
        found = samples(served.metrics.registry)
        assert found["offramp_queue_depth", (("model", "tiny"), ("segment", "2"))] == 12


async def test_the_old_version_is_freed(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        await served.results("a good film")
        old = weakref.ref(served.catalog.default.engine)
        threads = {thread for thread in threading.enumerate() if thread.name.startswith("offramp-worker")}
        gc.disable()
        try:
            await served.catalog.reload("tiny")
            assert old() is None, "its memory is free at once, not when cycles are next looked for"
        finally:
            gc.enable()
        assert not any(thread.is_alive() for thread in threads)


async def test_a_bad_bundle_changes_nothing_and_says_why(
    link: Link, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(link.bundle, admin="open") as served:
        link.turn_to(spoiled(link.bundle, tmp_path))
        refused = await served.client.post(ROUTE)
        assert refused.status_code == 422
        error = error_of(refused)
        assert "segment_2.onnx: sha256 is not the manifest's" in error["message"]
        assert "\n" not in error["message"]
        assert "version 1 goes on serving" in caplog.text
        assert (await served.classify("a good film")).json()["version"] == "1"
        assert (await served.client.get("/readyz")).status_code == 200
        found = samples(served.metrics.registry)
        assert found["offramp_model_reloads_total", (("model", "tiny"), ("outcome", "failure"))] == 1
        link.turn_to("2")
        assert (await served.client.post(ROUTE)).status_code == 200


async def test_a_bundle_of_another_name_is_refused(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        link.turn_to("4")
        error = error_of(await served.client.post(ROUTE))
        assert error["type"] == "invalid"
        assert "is called other, and requests ask for tiny" in error["message"]
        assert list(served.catalog.models) == ["tiny"]


async def test_a_folder_that_changes_while_it_is_loaded_is_refused(
    tmp_path: Path, versions: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(versions["1"].path, folder)
    warm_up = Runner.warm_up

    def swap_and_warm_up(runner: Runner, *arguments: Any) -> None:
        shutil.rmtree(folder)
        shutil.copytree(versions["2"].path, folder)
        warm_up(runner, *arguments)

    async with serving(Bundle.load(folder), admin="open") as served:
        monkeypatch.setattr(Runner, "warm_up", swap_and_warm_up)
        assert "changed while it was loaded" in error_of(await served.client.post(ROUTE))["message"]
        monkeypatch.undo()
        assert (await served.classify("a film")).json()["version"] == "1"
        assert (await served.client.post(ROUTE)).json()["new_version"] == "2"


async def test_a_file_that_changes_while_it_is_loaded_is_refused_though_the_manifest_stays(
    tmp_path: Path, versions: dict[str, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where somebody copies a bundle over another one, file by file, and is not done."""
    folder = tmp_path / "bundle"
    shutil.copytree(versions["1"].path, folder)
    graph = versions["2"].graph(2).relative_to(versions["2"].path)
    warm_up = Runner.warm_up

    def copy_and_warm_up(runner: Runner, *arguments: Any) -> None:
        shutil.copyfile(versions["2"].path / graph, folder / graph)
        warm_up(runner, *arguments)

    async with serving(Bundle.load(folder), admin="open") as served:
        monkeypatch.setattr(Runner, "warm_up", copy_and_warm_up)
        assert "changed while it was loaded" in error_of(await served.client.post(ROUTE))["message"]


async def test_links_that_lead_in_a_circle_are_a_bad_bundle(link: Link, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(link.bundle.path, copy)
    (copy / "calibration.json").unlink()
    (copy / "calibration.json").symlink_to("calibration.json")
    async with serving(link.bundle, admin="open") as served:
        for target in (copy, link.path):
            link.turn_to(target)
            assert (await served.client.post(ROUTE)).status_code == 422


async def test_what_is_asked_for_while_a_reload_goes_on_is_done_afterwards(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    warm_up = Runner.warm_up

    def wait_and_warm_up(runner: Runner, *arguments: Any) -> None:
        begun.set()
        assert go.wait(60)
        warm_up(runner, *arguments)

    async with serving(link.bundle, admin="open") as served:
        monkeypatch.setattr(Runner, "warm_up", wait_and_warm_up)
        reload = OnceMore(served.catalog.reload_all)
        reload.ask()
        assert await asyncio.to_thread(begun.wait, 60)
        link.turn_to("2")
        for _ in range(3):
            reload.ask()
        go.set()
        await eventually(lambda: served.catalog.default.version == "2")
        await eventually(lambda: not served.catalog._reloading["tiny"].locked())
        found = samples(served.metrics.registry)
        assert found["offramp_model_reloads_total", (("model", "tiny"), ("outcome", "success"))] == 2


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_last_of_many_sighups_counts(link: Link, workers: int) -> None:
    info = 'model_info{device="cpu",exits="4",labels="2",model="tiny",precision="fp32",version="%s"}'
    with process(link.bundle, workers=workers, threads=1, measure_seconds=0) as server:
        for version in ("2", "1", "2"):
            link.turn_to(version)
            server.signal(signal.SIGHUP)
            await asyncio.sleep(0.05)
        await until(server, info % "2", lambda value: value == 1)
        # Of several processes any may be the last.
        await until(server, info % "1", lambda value: value == 0)
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_models_are_reloaded_by_name_and_others_are_not_touched(link: Link, pair_bundle: Bundle) -> None:
    async with serving(link.bundle, pair_bundle, admin="open") as served:
        pairs = served.catalog.models["tiny-pairs"]
        link.turn_to("2")
        assert (await served.client.post(ROUTE)).status_code == 200
        assert served.catalog.models["tiny-pairs"] is pairs
        assert list(served.catalog.models) == ["tiny", "tiny-pairs"]
        nobody = await served.client.post("/admin/models/nobody/reload")
        assert (nobody.status_code, error_of(nobody)["type"]) == (404, "not_found")


class _Slow:
    """Holds a reload up where the new bundle is loaded, until ``go`` is set."""

    def __init__(self, served: Served) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        reopen = served.catalog._reopen

        def wait_and_reopen(old: ServedModel) -> ServedModel:
            self.begun.set()
            assert self.go.wait(60)
            return reopen(old)

        served.catalog._reopen = wait_and_reopen


async def test_while_one_is_loaded_the_old_one_serves_and_a_second_reload_is_refused(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        slow = _Slow(served)
        link.turn_to("2")
        first = asyncio.ensure_future(served.client.post(ROUTE))
        assert await asyncio.to_thread(slow.begun.wait, 60)
        second = await served.client.post(ROUTE)
        assert (second.status_code, error_of(second)["type"]) == (409, "conflict")
        assert (await served.client.get("/readyz")).status_code == 200
        assert (await served.classify("a film")).json()["version"] == "1"
        slow.go.set()
        assert (await first).json()["new_version"] == "2"
        assert (await served.client.post(ROUTE)).status_code == 200


async def test_a_server_that_drains_meanwhile_drops_what_was_loaded(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        slow, old = _Slow(served), served.catalog.default
        reload = asyncio.ensure_future(served.client.post(ROUTE))
        assert await asyncio.to_thread(slow.begun.wait, 60)
        served.catalog.draining = True
        slow.go.set()
        response = await reload
        assert (response.status_code, error_of(response)["type"]) == (503, "draining")
        assert served.catalog.default is old


async def test_old_work_finishes_on_the_old_version_while_the_new_one_answers(link: Link) -> None:
    async with serving(link.bundle, admin="open", runs=1) as served:
        release, entered = threading.Event(), threading.Event()
        runner = served.catalog.default.engine._stepper._runner
        run = runner.run

        def held_up(*arguments: Any, **options: Any) -> Any:
            entered.set()
            assert release.wait(60)
            return run(*arguments, **options)

        runner.run = held_up  # type: ignore[method-assign]
        begun = asyncio.ensure_future(served.classify(["a good film", "a dull film"], quality=1.0))
        assert await asyncio.to_thread(entered.wait, 60)
        waiting = asyncio.ensure_future(served.classify(["a", "b", "c"]))
        link.turn_to("2")
        reload = asyncio.ensure_future(served.client.post(ROUTE))
        await eventually(lambda: served.catalog.default.version == "2")
        assert (await served.classify("a film")).json()["version"] == "2"
        assert not reload.done(), "the old version has work to finish"
        release.set()
        for reply in await asyncio.gather(begun, waiting):
            assert reply.json()["version"] == "1"
            assert {result["label"] for result in reply.json()["results"]} <= set(ENGLISH)
        assert (await reload).status_code == 200


async def test_the_old_engine_takes_work_as_long_as_a_request_holds_it(link: Link) -> None:
    async with serving(link.bundle, admin="open") as served:
        old = served.catalog.default
        with old.users:
            reload = asyncio.ensure_future(served.catalog.reload("tiny"))
            await eventually(lambda: served.catalog.default is not old)
            await asyncio.sleep(0.05)
            assert old.engine.healthy
        await reload
        assert not old.engine.healthy


async def test_an_error_nobody_foresaw_leaves_the_old_version_and_the_next_reload_possible(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError

    async with serving(link.bundle, admin="open") as served:
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "warm_up", broken)
            assert (await served.client.post(ROUTE)).status_code == 500
            await served.catalog.reload_all()
        assert (await served.classify("a film")).status_code == 200
        assert (await served.catalog.reload("tiny")).new_version == "1"


async def test_the_route_is_there_where_keys_are_asked_for_or_it_is_opened(tiny_bundle: Bundle) -> None:
    key = {"authorization": "Bearer secret"}
    for settings, headers, status in (
        ({}, {}, 404),
        ({"api_key": ("secret",)}, {}, 401),
        ({"api_key": ("secret",)}, key, 200),
        ({"admin": "open"}, {}, 200),
        ({"admin": "open", "api_key": ("secret",)}, {}, 401),
        ({"admin": "off", "api_key": ("secret",)}, key, 404),
    ):
        async with serving(tiny_bundle, **settings) as served:
            assert (await served.client.post(ROUTE, headers=headers)).status_code == status, settings


def test_a_reload_error_crosses_from_process_to_process() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ReloadError("busy", "wait")))
    assert (error.kind, error.message, str(error)) == ("busy", "wait", "wait")


async def _load_until(server: Process, done: asyncio.Event, seen: list[dict[str, Any]]) -> None:
    """Asks for several texts a request until ``done``; every answer must be whole, and of one version."""
    labels = {"1": set(ENGLISH), "2": set(GERMAN)}
    while not done.is_set():
        reply = await classify(server, ["a good film", "dull", "a very long and sad movie"], top_k=2)
        assert reply.status == 200, reply.body
        document = reply.json()
        for result in document["results"]:
            assert {score["label"] for score in result["scores"]} == labels[document["version"]]
        seen.append(document)


@pytest.mark.parametrize("workers", [1, 2])
async def test_reloads_under_load_lose_nothing_and_mix_nothing(link: Link, workers: int) -> None:
    with process(link.bundle, workers=workers, threads=1, measure_seconds=0, admin="open") as server:
        done, seen = asyncio.Event(), [[] for _ in range(6)]
        clients = [asyncio.ensure_future(_load_until(server, done, mine)) for mine in seen]
        for version in ("2", "1", "2"):
            link.turn_to(version)
            reply = await ask(server, "POST", ROUTE)
            assert reply.status == 200, reply.body
            assert reply.json()["new_version"] == version
        link.turn_to("1")
        server.signal(signal.SIGHUP)
        await until(server, 'model_reloads_total{model="tiny",outcome="success"}', lambda count: count == 4 * workers)
        assert (await classify(server, "a film")).json()["version"] == "1"
        done.set()
        await asyncio.gather(*clients)
        assert {document["version"] for mine in seen for document in mine} == {"1", "2"}
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize("workers", [1, 2])
async def test_sighup_with_a_bad_bundle_is_a_line_in_the_log(link: Link, workers: int, tmp_path: Path) -> None:
    with process(link.bundle, workers=workers, threads=1, measure_seconds=0) as server:
        link.turn_to(spoiled(link.bundle, tmp_path))
        server.signal(signal.SIGHUP)
        await asyncio.to_thread(server.wait_for, "version 1 goes on serving")
        assert await metric(server, 'model_reloads_total{model="tiny",outcome="failure"}') == 1
        assert (await classify(server, "a film")).json()["version"] == "1"
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log

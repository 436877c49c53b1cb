"""The OpenAPI document, and requests that schemathesis makes up from it."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import Served
from tests.server.process import Process

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_whatever_the_document_allows_or_forbids_gets_an_answer_that_it_describes(
    server: Process, mode: schemathesis.GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 12
    if mode.is_negative:
        # A route that takes nothing has nothing to get wrong.
        operations = [operation for operation in operations if operation.body]
        assert len(operations) >= 4
    for operation in operations:

        @settings(
            max_examples=10,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def answered(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=30)

        answered()


@pytest.mark.anyio
async def test_every_example_of_every_door_is_answered_but_pairs_by_a_model_of_single_texts(doors: Served) -> None:
    answered = 0
    for path, operations in doors.app.openapi()["paths"].items():
        body = operations.get("post", {}).get("requestBody", {"content": {}})["content"].get("application/json", {})
        for name, example in body.get("examples", {}).items():
            # 25 ms may be too few on a busy machine.
            patience = {"deadline_ms": 60_000} if "deadline_ms" in example["value"] else {}
            url = path.format(model="tiny", version="1")
            response = await doors.client.post(url, json=example["value"] | patience)
            assert response.status_code == (422 if "pair" in name else 200), (path, name, response.text)
            answered += response.status_code == 200
    assert answered >= 15

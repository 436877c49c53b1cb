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

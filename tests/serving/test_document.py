"""The OpenAPI document tells the truth: requests made from it get what it says, and never a fault."""

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS, not_a_server_error

from mlxft.models.load import vocabulary_size
from mlxft.serving.app import make_app
from mlxft.serving.engine import Limits, load_engine
from mlxft.serving.served import Served


@pytest.fixture(scope="module")
def app(folder):
    engine = load_engine(folder, limits=Limits(max_concurrent=8)).start()
    yield make_app(Served(engine, "tiny", vocabulary_size(folder)))
    engine.stop()


@pytest.fixture(scope="module")
def document(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def test_every_path_is_in_the_document(app):
    paths = app.openapi()["paths"]
    assert set(paths) == {
        "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/models", "/v1/models/{name}",
        "/v1/adapters", "/v1/adapters/{name}", "/health", "/metrics",
    }  # fmt: skip
    for path in paths.values():
        for operation in path.values():
            assert "422" not in operation["responses"]


@pytest.mark.slow
def test_requests_made_from_the_document_get_what_it_says(document):
    names = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
    checks = [not_a_server_error, *(CHECKS.get_one(name) for name in names)]
    settings = hypothesis.settings(
        max_examples=60, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    for result in document.get_all_operations():
        operation = result.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy())
        def meets(case):
            if isinstance(case.body, dict) and "max_tokens" in case.body:
                case.body["max_tokens"] = 4  # quick answers
            case.call_and_validate(checks=checks)

        meets()

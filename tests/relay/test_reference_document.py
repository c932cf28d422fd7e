"""The OpenAPI document and the relay that serves it say the same."""

import json
from pathlib import Path

import hypothesis
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from reference_calls import BATCH, MESSAGES, MINT, REVISION, TOKEN, client, event
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection

import relay_client
from relay_client.reference import Relay, Store
from relay_client.reference.app import REFERENCE_PREFIX
from relay_client.reference.mcp import IDEMPOTENCY_KEY
from relay_client.reference.process import RelayProcess

SEED = 20260728
DOCUMENT = json.loads((Path(relay_client.__file__).parent / "openapi.json").read_text(encoding="utf-8"))
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
MCP_METHODS = ("tools/list", "tools/call", "server/discover")


@pytest.fixture(scope="module")
def relay(tmp_path_factory):
    """The relay that the tests of this file share."""
    db = tmp_path_factory.mktemp("relay") / "relay.sqlite"
    with RelayProcess(db, [TOKEN], options=["--path", "/api/reviews"]) as process:
        yield process


@pytest.fixture(scope="module")
def schema(relay):
    """The document as the relay serves it."""
    return schemathesis.openapi.from_url(f"{relay.url}/api/spec")


def test_each_path_is_documented_and_each_documented_path_served(tmp_path):
    """Routes and document name the same methods of the same paths; what is for reading back is left out."""
    store = Store(str(tmp_path / "relay.sqlite"))
    routes = Relay(store)._routes
    store.close()
    served = {(method, path) for path, methods in routes.items() for method in methods}
    assert served == set(OPERATIONS)
    assert not [path for _, path in served if path.startswith(REFERENCE_PREFIX)]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_each_documented_path_answers(relay, method, path):
    """Not with 404 or 405, and with a status that the document names."""
    with client(relay.url) as http:
        answer = http.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code not in (404, 405)
    assert str(answer.status_code) in DOCUMENT["paths"][path][method.lower()]["responses"]


def test_a_custom_path_is_in_the_document_that_is_served(relay):
    """Whoever reads the document of this relay sees the paths it was told to take."""
    with client(relay.url) as http:
        paths = http.get("/api/spec").json()["paths"]
    assert set(paths) - set(DOCUMENT["paths"]) == {"/api/reviews"}


def test_the_references_in_the_document_lead_somewhere():
    """Every `$ref` has its target, and every component is used."""
    text = json.dumps(DOCUMENT)
    names = {
        f"#/components/{sort}/{name}" for sort, named in DOCUMENT["components"].items() for name in named
    }
    used = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert used <= names
    assert names - used == {"#/components/securitySchemes/bearer"}


def test_the_examples_keep_their_own_schemas():
    """An example that nobody may send would mislead."""
    schemas = DOCUMENT["components"]["schemas"]
    for example in schemas["Event"]["examples"]:
        root = {"$ref": "#/components/schemas/Event", "components": DOCUMENT["components"]}
        jsonschema.Draft202012Validator(root).validate(example)


@pytest.mark.parametrize("mode", GenerationMode, ids=str)
@pytest.mark.parametrize(
    ("method", "path"), [operation for operation in OPERATIONS if operation[0] == "POST"]
)
def test_generated_requests_are_answered_as_documented(schema, method, path, mode):
    """What the document allows is taken, what it forbids is refused, each answer has the form it names."""
    print(f"seed {SEED}")
    # A bad message in a batch is refused in its own result, which the check cannot know.
    excluded = [negative_data_rejection] if path == BATCH else []
    statuses = set()

    @hypothesis.seed(SEED)
    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    def exchange(case):
        if mode is GenerationMode.POSITIVE:
            agree(case)
        answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
        statuses.add(answer.status_code)
        case.validate_response(answer, excluded_checks=excluded)

    exchange()
    assert mode is GenerationMode.NEGATIVE or {200, 201, 207} & statuses


def agree(case):
    """Make the parts of a generated request agree where the document says so in words only."""
    body, headers = case.body, case.headers
    if "idempotencyKey" in body:
        body["idempotencyKey"] = f"{case.path}:{body['idempotencyKey']}"[:512]
    if "chunkIndex" in body:
        body["totalChunks"] = body["chunkIndex"] + 1
        body["chunkIndex"] = 0
    if "jsonrpc" in body:
        body["method"] = MCP_METHODS[len(str(body["id"])) % len(MCP_METHODS)]
        body["params"] |= {"name": "echo", "arguments": {}}
        headers.update({"Mcp-Method": body["method"], "Mcp-Name": "echo"})
    if "Idempotency-Key" in headers:
        key = body.get("idempotencyKey") or body["params"]["_meta"].setdefault(IDEMPOTENCY_KEY, "k")
        headers["Idempotency-Key"] = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def error_requests(http):
    """One request for each kind of error that needs no fault, by the status it must get."""
    yield 400, http.build_request("POST", MESSAGES, content="{", headers={"Content-Type": "application/json"})
    yield 401, http.build_request("POST", MESSAGES, json=event("e"), headers={"Authorization": "Bearer x"})
    yield 403, http.build_request("POST", MESSAGES, json=event("e"), headers={"Origin": "http://x.example"})
    yield 409, http.build_request("POST", MESSAGES, json=event("documented"))
    yield 413, http.build_request("POST", MESSAGES, json=event("e", body="x" * (17 * 2**20)))
    yield 415, http.build_request("POST", MESSAGES, content="{}", headers={"Content-Type": "text/plain"})
    yield 422, http.build_request("POST", MINT, json={})


def test_errors_have_the_documented_form(relay):
    """Each is an RFC 9457 problem with a code, as the schema says."""
    root = {"$ref": "#/components/schemas/Problem", "components": DOCUMENT["components"]}
    validator = jsonschema.Draft202012Validator(root)
    with client(relay.url) as http:
        http.post(MESSAGES, json=event("documented"))
        for status, request in error_requests(http):
            answer = http.send(request)
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            validator.validate(answer.json())
            assert answer.json()["status"] == status


def test_the_revision_of_mcp_is_the_documented_one():
    """The document pins the revision that the relay speaks."""
    assert DOCUMENT["components"]["parameters"]["McpProtocolVersion"]["schema"] == {"const": REVISION}

"""/set_internal_state, /freeze_gc and /dump_requests; who may call them is in the route matrix."""

import httpx
import pytest
from fake_frontend import Running

from headrace.messages.operations import LimitChanges


def test_limits_are_passed_on_and_shown(client: httpx.Client, server: Running):
    reply = client.post("/set_internal_state", json={"server_args": {"max_queued_requests": 7}})
    limits = {
        "max_running_requests": 4,
        "max_queued_requests": 7,
        "chunked_prefill_size": 128,
        "schedule_conservativeness": 1.0,
        "max_step_ms": 200,
    }
    assert reply.json() == {"success": True, "updated": True, "server_args": limits}
    assert server.frontend.changes == [LimitChanges(max_queued_requests=7)]
    assert client.get("/server_info").json()["max_queued_requests"] == 7


@pytest.mark.parametrize(
    "values",
    [
        {"model_path": "x"},
        {"max_running_requests": 0},
        {"max_running_requests": "4"},
        {"chunked_prefill_size": -2},
        {"schedule_conservativeness": 0},
        {"max_step_ms": 0.5},
        {"max_queued_requests": 2**40},
    ],
)
def test_a_bad_value_is_refused_by_its_name(client: httpx.Client, server: Running, values: dict[str, object]):
    reply = client.post("/set_internal_state", json={"server_args": values})
    assert reply.status_code == 400
    assert next(iter(values)) in reply.json()["error"]["param"]
    assert not server.frontend.changes
    assert client.post("/set_internal_state", json={}).status_code == 400
    assert client.get("/set_internal_state").status_code == 405


def test_garbage_collection_is_frozen_by_post_only(client: httpx.Client, server: Running):
    assert client.get("/freeze_gc").status_code == 405
    assert client.post("/freeze_gc").json()["success"] is True
    assert server.frontend.num_frozen == 1


def test_a_dump_names_its_file_without_the_folder(client: httpx.Client, server: Running):
    reply = client.post("/dump_requests").json()
    said = {"message": "wrote requests-1.json; number of requests: 3", "file": "requests-1.json", "num_requests": 3}
    assert reply == {"success": True, **said}
    server.frontend.dumps = None
    assert client.post("/dump_requests").status_code == 400


@pytest.mark.parametrize(
    "route",
    [
        "/freeze_gc",
        "/dump_requests",
        "/flush_cache",
        "/stop_profile",
        "/start_expert_distribution_record",
        "/dump_expert_distribution_record",
        "/stop_expert_distribution_record",
    ],
)
def test_routes_without_fields_need_no_body_and_refuse_what_they_would_ignore(client: httpx.Client, route: str):
    client.post("/start_expert_distribution_record")
    reply = client.post(route, json={"prompts": True, "timeout": None})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompts"
    assert client.post(route, content=b"nonsense").json()["error"]["code"] == "invalid_json"
    for options in ({}, {"json": {}}, {"json": {"prompts": None}}):
        said = client.post(route, **options).text
        assert "prompts" not in said
        assert "JSON" not in said

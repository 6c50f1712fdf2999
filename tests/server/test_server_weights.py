"""Routes of weights, pausing and memory: the bodies that trainers send, and what they get back."""

import base64

import httpx
import pytest
from fake_frontend import Running

from headrace.messages.weights import (
    CheckWeights,
    ContinueGeneration,
    DestroyGroup,
    GetWeight,
    InitGroup,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SaveWeights,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
    WeightOpReply,
)

DISTRIBUTED = {"names": ["a", "b"], "dtypes": ["bfloat16", "torch.float32"], "shapes": [[2, 3], [4]], "group_name": "g"}
SENT = [
    ("/pause_generation", {}, PauseGeneration("abort")),
    ("/pause_generation", {"mode": "in_place"}, PauseGeneration("in_place")),
    ("/continue_generation", {}, ContinueGeneration()),
    (
        "/update_weights_from_disk",
        {"model_path": "m", "load_format": None, "abort_all_requests": True, "weight_version": "3", "flush_cache": False},
        UpdateFromDisk("m", "auto", True, "3"),
    ),
    (
        "/init_weights_update_group",
        {"master_address": "h", "master_port": "29500", "rank_offset": 1, "world_size": 2, "group_name": "g", "backend": "nccl"},
        InitGroup("h", 29500, 1, 2, "g", "nccl", 300.0),
    ),
    (
        "/update_weights_from_distributed",
        {**DISTRIBUTED, "flush_cache": False, "weight_version": "4"},
        UpdateFromDistributed(("a", "b"), ("bfloat16", "float32"), ((2, 3), (4,)), "g", False, False, "4"),
    ),
    (
        "/update_weights_from_distributed",
        {**DISTRIBUTED, "load_format": "flattened_bucket"},
        UpdateFromDistributed(("a", "b"), ("bfloat16", "float32"), ((2, 3), (4,)), "g", True),
    ),
    ("/destroy_weights_update_group", {"group_name": "g"}, DestroyGroup("g")),
    ("/update_weight_version", {"new_version": "5", "abort_all_requests": True}, SetWeightVersion("5", True)),
    ("/save_sharded_state", {"path": "step-7", "pattern": None, "max_size": None}, SaveWeights("step-7")),
    ("/release_memory_occupation", {}, ReleaseMemory(("kv_cache", "weights"))),
    ("/resume_memory_occupation", {"tags": ["weights"]}, ResumeMemory(("weights",))),
]  # fmt: skip


@pytest.mark.parametrize("path, body, operation", SENT)
def test_what_trainers_send_is_understood(path, body, operation, client: httpx.Client, server: Running):
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json() == {"success": True, "message": "done", "num_paused_requests": 0, "weight_version": "default"}
    assert server.frontend.weights.operations == [operation]
    server.frontend.weights.reply = WeightOpReply(1, False, "no", "default")
    reply = client.post(path, json=body)
    assert (reply.status_code, reply.json()["success"], reply.json()["message"]) == (400, False, "no")


def test_tensors_come_as_a_file_or_in_base64(client: httpx.Client, server: Running):
    data = bytes(range(256)) * 100
    octets = {"content-type": "application/octet-stream"}
    reply = client.post("/update_weights_from_tensor?weight_version=9&flush_cache=false", content=data, headers=octets)
    assert reply.status_code == 200, reply.text
    assert server.frontend.weights.file == data
    (operation,) = server.frontend.weights.operations
    assert isinstance(operation, UpdateFromTensors)
    assert operation.weight_version == "9"
    server.frontend.weights.file = b""
    body = {"serialized_named_tensors": [base64.b64encode(data).decode()], "load_format": None, "flush_cache": False}
    assert client.post("/update_weights_from_tensor", json=body).status_code == 200
    assert server.frontend.weights.file == data
    for refused in (
        client.post("/update_weights_from_tensor?colour=red", content=data, headers=octets),
        client.post("/update_weights_from_tensor", json=body | {"serialized_named_tensors": []}),
        client.post("/update_weights_from_tensor", json=body | {"load_format": "direct"}),
    ):
        assert refused.status_code == 400
        assert "error" in refused.json()


@pytest.mark.parametrize(
    "path, body",
    [
        ("/pause_generation", {"mode": "gently"}),
        ("/update_weights_from_disk", {"model_path": "m", "load_format": "pt"}),
        ("/update_weights_from_disk", {"model_path": "m", "is_async": True}),
        ("/update_weights_from_distributed", DISTRIBUTED | {"dtypes": ["float32"]}),
        ("/update_weights_from_distributed", DISTRIBUTED | {"shapes": [[2], [-1]]}),
        ("/init_weights_update_group", {"master_address": "h", "master_port": "x", "rank_offset": 1, "world_size": 2}),
        ("/init_weights_update_group", {"master_address": "h", "master_port": 1, "rank_offset": 0, "world_size": 2}),
        ("/release_memory_occupation", {"tags": ["heap"]}),
        ("/get_weights_by_name", {"name": "a", "truncate_size": -1}),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(path, body, client: httpx.Client, server: Running):
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert "error" in reply.json()
    assert server.frontend.weights.operations == []


def test_slimes_check_of_an_update(client: httpx.Client, server: Running):
    """As it is sent around the first update, and what SGLang's newer clients add."""
    path = "/weights_checker"
    for action in ("snapshot", "compare", "checksum"):
        assert client.post(path, json={"action": action}).json() == {"success": True, "message": "done"}
        assert server.frontend.weights.operations[-1] == CheckWeights(action)
    more = {"allow_quant_error": True, "skip_tensor_list": ["lm_head"], "selector": "all"}
    assert client.post(path, json={"action": "reset_tensors"} | more).status_code == 200

    assert server.frontend.weights.operations[-1] == UpdateFromTensors("", random_but=("lm_head",))
    server.frontend.weights.reply = WeightOpReply(1, True, "two", "v", values=b'{"a": "1", "b": "2"}')
    reply = client.post(path, json={}).json()
    (rank,) = reply["ranks"]
    assert rank["checksums"] == {"a": "1", "b": "2"}
    assert rank["per_gpu_checksum"] == reply["per_engine_checksum"]
    server.frontend.weights.reply = WeightOpReply(1, False, "2 of 3 weights differ", "v")
    reply = client.post(path, json={"action": "compare"})
    assert (reply.status_code, reply.json()) == (400, {"success": False, "message": "2 of 3 weights differ"})
    refused = client.post(path, json={"action": "reset"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "action")


def test_there_is_nothing_to_do_after_an_update(client: httpx.Client, server: Running):
    for body in (
        {"restore_weights_before_load": True, "post_process_quantization": False},
        {"restore_weights_before_load": False, "post_process_quantization": True},
        {},
    ):
        reply = client.post("/post_process_weights", json=body)
        assert (reply.status_code, reply.json()["success"]) == (200, True)
        assert "nothing to do" in reply.json()["message"]
    assert client.post("/post_process_weights", json={"other": 1}).status_code == 400
    assert server.frontend.weights.operations == []


def test_weights_and_their_version_can_be_read(client: httpx.Client, server: Running):
    import struct

    server.frontend.weights.reply = WeightOpReply(1, True, "", "v", shape=(2, 2), values=struct.pack("<4f", 1, 2, 3, 4))
    reply = client.post("/get_weights_by_name", json={"name": "a", "truncate_size": 2})
    assert reply.json() == [[1.0, 2.0], [3.0, 4.0]]
    assert server.frontend.weights.operations == [GetWeight("a", 2)]
    server.frontend.weights.version = "v"
    assert client.get("/weight_version").json() == client.get("/get_weight_version").json() == {"weight_version": "v"}
    assert client.get("/model_info").json()["weight_version"] == "v"

"""Changes at run time apply to all replicas, including restarted ones."""

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from reliability_harness import ADMIN_KEY, START_S, Server, Stream, greedy, wait_until
from safetensors.torch import load_file, save, save_file

from headrace.api.engine import Engine

BODY: dict[str, Any] = {"text": "The weights are", "sampling_params": greedy(12)}


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with its rows of embeddings in another order: it says something else."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path)
    return folder


def ids_of(reply: dict[str, Any]) -> list[int]:
    return list(reply["output_ids"])


def test_weights_and_pauses_outlive_a_scheduler(tiny_model: Path, other_model: Path):
    options: dict[str, Any] = {"single_process": True, "num_threads": 1, "max_total_tokens": 256, "log_level": "error"}
    with Engine(model_path=str(other_model), **options) as engine:
        want = ids_of(engine.generate(BODY["text"], BODY["sampling_params"]))
    with (
        Server(tiny_model, ("--dp-size", "2")) as server,
        server.wait_started().client() as client,
        server.client(ADMIN_KEY) as admin,
    ):

        def of(replica: int) -> list[int]:
            return ids_of(client.post("/generate", json=BODY | {"routed_dp_rank": replica}).json())

        first = of(0)
        assert first == of(1) != want
        body = {"model_path": str(other_model), "weight_version": "other"}
        updated = admin.post("/update_weights_from_disk", json=body)
        assert updated.json()["success"], updated.text
        assert [of(0), of(1)] == [want, want]
        assert admin.post("/pause_generation", json={"mode": "retract"}).json()["success"]

        victim = next(c for c in server.process.children() if "scheduler" in c.cmdline())
        victim.kill()
        wait_until(lambda: "process is back" in server.log(), "it is back", START_S)
        waiting = [
            Stream(client, "/generate", BODY | {"routed_dp_rank": replica, "rid": f"waits-{replica}"}, stream=False)
            for replica in (0, 1)
        ]
        wait_until(lambda: server.state()["num_waiting"] == 2, "both wait")
        assert [replica["paused"] for replica in server.state()["replicas"]] == ["retract", "retract"]
        assert admin.post("/continue_generation", json={}).json()["success"]
        for stream in waiting:
            stream.join(START_S)
        assert [ids_of(stream.last) for stream in waiting] == [want, want]
        assert waiting[0].last["meta_info"]["weight_version"] == "other"

        # Tensors that came from a trainer are nowhere else: without them there is nothing true to go on with.
        tensors = save(load_file(tiny_model / "model.safetensors"))
        pushed = admin.post(
            "/update_weights_from_tensor", content=tensors, headers={"Content-Type": "application/octet-stream"}
        )
        assert pushed.json()["success"], pushed.text
        assert [of(0), of(1)] == [first, first]
        server.children = server.engine_children()
        schedulers = [child for child in server.children if "scheduler" in child.cmdline()]
        schedulers[1].kill()
        wait_until(lambda: "is not restarted; the other replicas continue" in server.log(), "it is given up", START_S)
        assert ids_of(client.post("/generate", json=BODY).json()) == first
        assert client.get("/health").status_code == 200
        schedulers[0].kill()
        assert server.wait() == 1
        _, alive = psutil.wait_procs([server.process, *server.children], timeout=10)
        assert not alive
        assert "not restarted" in server.log()


def test_weights_that_were_overwritten_are_not_served_under_the_name_of_others(
    tiny_model: Path, other_model: Path, tmp_path: Path
):
    served = tmp_path / "served"
    shutil.copytree(tiny_model, served)
    with (
        Server(served, ("--dp-size", "2", "--max-restarts", "3")) as server,
        server.wait_started().client() as client,
    ):
        want = ids_of(client.post("/generate", json=BODY).json())
        # Of the same size and under the same path.
        shutil.copyfile(other_model / "model.safetensors", served / "model.safetensors")
        next(c for c in server.process.children() if "scheduler" in c.cmdline()).kill()
        wait_until(lambda: "the other replicas continue" in server.log(), "it is refused", START_S)
        assert server.log().count("could not be restarted") == 1, "not tried again"
        assert [ids_of(client.post("/generate", json=BODY).json()) for _ in range(4)] == [want] * 4


def test_a_trainer_that_writes_each_step_to_one_path_loses_no_server(
    tiny_model: Path, other_model: Path, tmp_path: Path
):
    step = tmp_path / "step"

    def write(model: Path, num_bytes: int | None = None) -> dict[str, Any]:
        step.mkdir(exist_ok=True)
        shutil.copyfile(model / "config.json", step / "config.json")
        with (step / "model.safetensors").open("wb") as file:  # in place
            file.write((model / "model.safetensors").read_bytes()[:num_bytes])
        return {"model_path": str(step), "weight_version": model.parent.name}

    def kill(server: Server) -> None:
        next(c for c in server.process.children() if "scheduler" in c.cmdline()).kill()

    write(tiny_model)
    with (
        Server(step, ("--tokenizer-path", str(tiny_model))) as server,
        server.wait_started().client() as client,
        server.client(ADMIN_KEY) as admin,
    ):
        first = ids_of(client.post("/generate", json=BODY).json())
        assert admin.post("/update_weights_from_disk", json=write(other_model)).json()["success"]
        second = ids_of(client.post("/generate", json=BODY).json())
        assert second != first
        write(tiny_model, 1000)  # of the next step
        kill(server)
        assert ids_of(client.post("/generate", json=BODY).json()) == second
        assert "starts in another way" in server.log()

    write(tiny_model)
    with (
        Server(step, ("--tokenizer-path", str(tiny_model), "--keep-updates", "off")) as server,
        server.wait_started().client() as client,
        server.client(ADMIN_KEY) as admin,
    ):
        assert admin.post("/update_weights_from_disk", json=write(other_model)).json()["success"]
        write(tiny_model)
        kill(server)
        reply = client.post("/generate", json=BODY)
        assert reply.status_code == 503
        assert "weights cannot be loaded again" in reply.json()["error"]["message"]
        assert "reason" in (health := client.get("/health")).json()
        assert health.status_code == 503
        cut_off = admin.post("/update_weights_from_disk", json=write(tiny_model, 1000))
        assert cut_off.status_code == 400, cut_off.text
        assert client.get("/health").status_code == 503
        healed = admin.post("/update_weights_from_disk", json=write(tiny_model))
        assert healed.json()["success"], healed.text
        reply = client.post("/generate", json=BODY)
        assert ids_of(reply.json()) == first
        assert reply.json()["meta_info"]["weight_version"] == tiny_model.parent.name
        assert client.get("/health").json() == {"status": "ok"}

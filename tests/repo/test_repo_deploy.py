"""What deploy/ says holds: manifests are valid, what they refer to exists, and options and metrics are ours. Nothing is built or started here.

The schemas in `schemas/` have the fields that are used, from the references of the APIs; a field that they lack is refused.
"""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from headrace.config.cli import parse
from headrace.config.machine import host_and_port, with_nodes
from headrace.config.server_args import ServerArgs
from headrace.config.settings import from_environment
from headrace.config.web import parse_prefill_hosts
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
OPTIONS = {field.name for field in fields(ServerArgs)}

MANIFESTS = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "adapter-rules.yaml")
LOADED = {path: yaml.safe_load(path.read_text()) for path in MANIFESTS}
GROUP, PAIR = KUBERNETES / "group", KUBERNETES / "disaggregation"


def by_kind(paths: Iterable[Path]) -> dict[str, Any]:
    """The manifests of the files, but for kustomizations, which have one of a kind each."""
    found = [LOADED[path] for path in paths if LOADED[path]["kind"] != "Kustomization"]
    assert len({manifest["kind"] for manifest in found}) == len(found)
    return {manifest["kind"]: manifest for manifest in found}


BY_KIND = by_kind(path for path in MANIFESTS if path.parent not in (GROUP, PAIR))
GROUP_BY_KIND = by_kind(path for path in MANIFESTS if path.parent == GROUP)
PODS_OF_GROUP = GROUP_BY_KIND["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
LEADER, WORKER = PODS_OF_GROUP["leaderTemplate"], PODS_OF_GROUP["workerTemplate"]
POD = BY_KIND["Deployment"]["spec"]["template"]
[SERVER] = POD["spec"]["containers"]
[PULL] = POD["spec"]["initContainers"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def name_of(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


# ------------------------------------------------------------------------------------------------ Kubernetes


def kubernetes_schema(kind: str) -> jsonschema_rs.Validator:
    schemas = yaml.safe_load((SCHEMAS / "kubernetes.yaml").read_text())
    return jsonschema_rs.validator_for({"$defs": schemas.pop("$defs") | schemas, **schemas[kind]})


def messages(validator: jsonschema_rs.Validator, instance: Any) -> list[str]:
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(instance)]


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in it, itself included."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(child)


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_a_manifest_is_what_its_schema_says(path):
    assert messages(kubernetes_schema(LOADED[path]["kind"]), LOADED[path]) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_a_field_that_the_schema_lacks_is_refused_wherever_it_stands(path):
    validator = kubernetes_schema(LOADED[path]["kind"])
    for index in range(len(list(objects(LOADED[path])))):
        changed = copy.deepcopy(LOADED[path])
        list(objects(changed))[index]["replica"] = 1
        assert not validator.is_valid(changed), index


@pytest.mark.parametrize("path", [path for path in MANIFESTS if path.name == "kustomization.yaml"], ids=name_of)
def test_a_kustomization_has_all_manifests_of_its_folder(path):
    others = {other.name for other in path.parent.glob("*.yaml")} - {path.name, "adapter-rules.yaml"}
    assert set(LOADED[path]["resources"]) == others


@pytest.mark.parametrize(
    "selector",
    [
        BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"],
        BY_KIND["Service"]["spec"]["selector"],
        BY_KIND["PodMonitor"]["spec"]["selector"]["matchLabels"],
        BY_KIND["InferencePool"]["spec"]["selector"]["matchLabels"],
    ],
    ids=["deployment", "service", "podmonitor", "inferencepool"],
)
def test_selectors_find_the_pods(selector):
    assert selector.items() <= POD["metadata"]["labels"].items()


def test_all_ports_are_that_of_the_server():
    [port] = SERVER["ports"]
    assert port["containerPort"] == parse(SERVER["args"]).port
    assert [entry["number"] for entry in BY_KIND["InferencePool"]["spec"]["targetPorts"]] == [port["containerPort"]]

    probes = (SERVER[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "liveness", "readiness"))
    named = [entry["targetPort"] for entry in BY_KIND["Service"]["spec"]["ports"]]
    named += [entry["port"] for entry in BY_KIND["PodMonitor"]["spec"]["podMetricsEndpoints"]]
    assert {*named, *probes} == {port["name"]}


def test_objects_that_manifests_name_are_there():
    target = BY_KIND["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["name"]) == ("apps/v1", BY_KIND["Deployment"]["metadata"]["name"])
    [rule] = BY_KIND["HTTPRoute"]["spec"]["rules"]
    assert [ref["name"] for ref in rule["backendRefs"]] == [BY_KIND["InferencePool"]["metadata"]["name"]]
    [image] = LOADED[KUBERNETES / "kustomization.yaml"]["images"]
    assert {SERVER["image"], PULL["image"]} == {image["name"]}


def test_the_autoscaler_does_not_fight_with_the_deployment():
    assert "replicas" not in BY_KIND["Deployment"]["spec"]


def test_probes_use_open_routes_and_a_recovery_does_not_kill_the_pod():
    paths = {kind: SERVER[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ping", "liveness": "/ping", "readiness": "/ready"}


def test_a_pod_and_a_container_wait_until_running_requests_have_ended():
    drain_s = parse(SERVER["args"]).drain_timeout_s
    assert POD["spec"]["terminationGracePeriodSeconds"] > drain_s + 10
    assert int(SERVICES["headrace"]["stop_grace_period"].removesuffix("s")) > drain_s + 10


def test_the_pod_downloads_the_model_that_it_serves():
    assert PULL["command"] == ["headrace", "pull", parse(SERVER["args"]).model_path]


@pytest.mark.parametrize("container", [SERVER, PULL], ids=lambda container: container["name"])
def test_mounts_are_volumes_of_the_pod(container):
    assert {mount["name"] for mount in container["volumeMounts"]} <= {
        volume["name"] for volume in POD["spec"]["volumes"]
    }


# ------------------------------------------------------------------------------------------------ a group of pods


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    [container] = template["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("index", [0, 1])
def test_pods_of_a_group_find_their_ranks_by_the_variables_of_leaderworkerset(index):
    args = parse(container_of(LEADER)["args"])
    size = PODS_OF_GROUP["size"]
    environ = {
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "headrace-group-0.headrace-group",
    }
    node = with_nodes(args, environ)

    assert (node.nnodes, node.node_rank) == (size, index)
    ports = {entry["name"]: entry["containerPort"] for entry in container_of(LEADER)["ports"]}
    assert ports == {"http": args.port, "ranks": host_and_port(node.dist_init_addr)[1]}


def test_pods_of_a_group_are_started_again_together_and_have_the_same_options():
    assert PODS_OF_GROUP["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, worker = container_of(LEADER), container_of(WORKER)
    for name in ("image", "args", "resources", "securityContext", "volumeMounts"):
        assert leader[name] == worker[name], name
    assert LEADER["spec"]["securityContext"] == WORKER["spec"]["securityContext"] == POD["spec"]["securityContext"]
    assert leader["image"] == LOADED[GROUP / "kustomization.yaml"]["images"][0]["name"]
    for template in (LEADER, WORKER):
        [pull] = template["spec"]["initContainers"]
        assert pull["command"] == ["headrace", "pull", parse(leader["args"]).model_path]
        assert template["spec"]["terminationGracePeriodSeconds"] > parse(leader["args"]).drain_timeout_s + 10
        mounts = {mount["name"] for mount in container_of(template)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}


def test_the_service_of_leaders_leaves_leaderworkerset_the_name_of_its_own():
    assert GROUP_BY_KIND["Service"]["metadata"]["name"] != GROUP_BY_KIND["LeaderWorkerSet"]["metadata"]["name"]


def test_all_pods_of_a_group_have_the_secret_and_only_the_leader_has_keys():
    names = {
        role: {entry["secretRef"]["name"] for entry in container_of(template)["envFrom"]}
        for role, template in (("leader", LEADER), ("worker", WORKER))
    }
    assert names == {"leader": {"headrace-dist", "headrace-keys"}, "worker": {"headrace-dist"}}


def test_requests_go_to_leaders_and_every_pod_of_a_group_is_probed():
    selectors = [
        GROUP_BY_KIND["Service"]["spec"]["selector"],
        BY_KIND["PodMonitor"]["spec"]["selector"]["matchLabels"],
        BY_KIND["InferencePool"]["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= LEADER["metadata"]["labels"].items()
        assert not selector.items() <= WORKER["metadata"]["labels"].items()

    for template, ready in ((LEADER, "/ready"), (WORKER, "/health")):
        probes = [container_of(template)[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
        assert [probe["path"] for probe in probes] == ["/health", "/health", ready]
        assert {probe["port"] for probe in probes} == {"http"}


# ------------------------------------------------------------------------------------------------ a pair of servers

PAIR_ITEMS = {(item["kind"], item["metadata"]["name"]): item["spec"] for item in LOADED[PAIR / "pair.yaml"]["items"]}
PODS_OF_PAIR = {
    name.removeprefix("headrace-"): spec["template"]
    for (kind, name), spec in PAIR_ITEMS.items()
    if kind == "Deployment"
}


def test_a_router_finds_both_servers_and_the_decode_server_the_other():
    prefill, decode = (parse(container_of(PODS_OF_PAIR[side])["args"]) for side in ("prefill", "decode"))
    assert (prefill.disaggregation_mode, decode.disaggregation_mode) == ("prefill", "decode")
    assert prefill.model_path == decode.model_path
    ports = {entry["name"]: entry["containerPort"] for entry in container_of(PODS_OF_PAIR["prefill"])["ports"]}
    assert ports == {"http": prefill.port, "kv": prefill.disaggregation_bootstrap_port}

    words = container_of(PODS_OF_PAIR["router"])["args"]
    workers = [
        f"http://headrace-prefill:{prefill.port}",
        str(ports["kv"]),
        "--decode",
        f"http://headrace-decode:{decode.port}",
    ]
    assert words[words.index("--prefill") + 1 :][:4] == workers
    assert parse_prefill_hosts(decode.disaggregation_prefill_hosts).allows("headrace-prefill", "34.118.224.5")
    assert not parse_prefill_hosts(decode.disaggregation_prefill_hosts).allows("other", "10.0.0.1")


def test_services_of_a_pair_have_the_ports_of_their_pods():
    selected = []
    for (kind, _), spec in PAIR_ITEMS.items():
        if kind == "Service":
            [(side, pod)] = [item for item in PODS_OF_PAIR.items() if item[1]["metadata"]["labels"] == spec["selector"]]
            ports = {entry["name"]: entry["containerPort"] for entry in container_of(pod)["ports"]}
            assert {entry["targetPort"]: entry["port"] for entry in spec["ports"]} == ports
            selected.append(side)
        else:
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert sorted(selected) == sorted(PODS_OF_PAIR)


@pytest.mark.parametrize("side", PODS_OF_PAIR)
def test_pods_of_a_pair_are_like_that_of_one_server(side: str):
    pod, container = PODS_OF_PAIR[side]["spec"], container_of(PODS_OF_PAIR[side])
    secrets = {entry["secretRef"]["name"] for entry in container["envFrom"]}
    assert secrets == ({"headrace-keys"} if side == "router" else {"headrace-dist", "headrace-keys"})
    assert (pod["securityContext"], container["securityContext"]) == (
        POD["spec"]["securityContext"],
        SERVER["securityContext"],
    )
    assert container["image"] in {image["name"] for image in LOADED[PAIR / "kustomization.yaml"]["images"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    if side != "router":
        assert pod["initContainers"] == [PULL]
        for name in ("startupProbe", "livenessProbe", "readinessProbe", "resources", "volumeMounts"):
            assert container[name] == SERVER[name]
        assert pod["terminationGracePeriodSeconds"] > parse(container["args"]).drain_timeout_s + 10


# ------------------------------------------------------------------------------------------------ metrics


def exported(names: str) -> dict[str, str]:
    """Type of every metric that a server exports with --metrics-compat NAMES."""
    return dict(re.findall(r"^# TYPE (\S+) (\w+)$", render(Metrics("tiny"), names).decode(), re.MULTILINE))


def test_the_autoscaler_reads_the_metric_that_the_adapter_makes_of_ours():
    [rule] = yaml.safe_load((KUBERNETES / "monitoring/adapter-rules.yaml").read_text())["rules"]["custom"]
    [metric] = BY_KIND["HorizontalPodAutoscaler"]["spec"]["metrics"]
    series = rule["seriesQuery"].partition("{")[0]

    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert exported(parse(SERVER["args"]).metrics_compat)[series] == "gauge"


@pytest.mark.parametrize("name", ["num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"])
def test_pods_export_what_the_endpoint_picker_reads(name):
    assert exported(parse(SERVER["args"]).metrics_compat)[f"vllm:{name}"] == "gauge"


# ------------------------------------------------------------------------------------------------ the image


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage of a Dockerfile, beginning with its FROM: (name, the rest)."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    found: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
            found[stage] = []
        found[stage].append((word, rest.strip()))
    return found


STAGES = stages((DEPLOY / "Dockerfile").read_text())
TARGETS = ("cpu", "cuda")


def instructions(stage: str, word: str) -> list[str]:
    """The arguments of an instruction in a stage and in those that it stands on."""
    (_, origin), *rest = STAGES[stage]
    below = instructions(origin.split()[0], word) if origin.split()[0] in STAGES else []
    return below + [arguments for found, arguments in rest if found == word]


def variables(stage: str) -> dict[str, str]:
    pairs = (pair.partition("=") for line in instructions(stage, "ENV") for pair in shlex.split(line))
    return {name: value for name, _, value in pairs}


def test_the_dockerfile_has_known_instructions_and_pinned_images():
    words = {word for stage in STAGES.values() for word, _ in stage}
    assert words <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "USER"}
    origins = {stage[0][1].split()[0] for stage in STAGES.values()} - STAGES.keys()
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+", origin) for origin in origins), origins
    assert list(STAGES)[-1] == "cpu", "the last stage is what is built without --target"


def test_what_the_build_copies_is_in_the_tree_and_nothing_else_is_sent():
    copied = {source for line in instructions("build", "COPY") for source in line.split()[:-1]}
    first, *rest = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] != "#"]

    assert first == "*"
    assert {line[1:] for line in rest if line.startswith("!")} == copied
    assert sorted(source for source in copied if not (ROOT / source).exists()) == []


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_the_account_of_the_manifests(target):
    [account] = [run for run in instructions(target, "RUN") if run.startswith("useradd ")]
    uid = int(re.search(r"--uid (\d+)", account).group(1))

    assert STAGES[target][-1] == ("USER", f"{uid}:{uid}")
    context = POD["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, uid, uid)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_installs_the_torch_that_its_constraints_pin(target):
    [pin] = re.findall(r"^torch==\S+\+(\S+)$", (ROOT / f"constraints/{target}.txt").read_text(), re.MULTILINE)
    [install] = [run for run in instructions(target, "RUN") if "pip install" in run]

    assert set(re.findall(r"-c /constraints/(\w+)\.txt", install)) == {target}
    assert set(re.findall(r"download\.pytorch\.org/whl/(\w+)", install)) == {pin}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_serves_with_options_that_exist(target):
    settings = from_environment(variables(target), OPTIONS)

    assert settings.notes == []
    assert settings.values["host"] == "0.0.0.0"
    assert instructions(target, "EXPOSE") == [str(settings.values["port"])]
    assert [json.loads(line) for line in instructions(target, "ENTRYPOINT")] == [["headrace", "serve"]]


def test_all_that_is_written_to_is_a_volume_or_temporary():
    environ = variables("cpu")
    folders = [environ["HEADRACE_CACHE_DIR"], environ["HF_HOME"], "/tmp"]

    mounted = [mount["mountPath"] for mount in SERVER["volumeMounts"]]
    composed = [volume.split(":")[1] for volume in SERVICES["headrace"]["volumes"]] + SERVICES["headrace"]["tmpfs"]
    for places in (mounted, composed):
        assert [folder for folder in folders if not any(Path(folder).is_relative_to(place) for place in places)] == []


@contextmanager
def server_that_answers(status: int) -> Iterator[int]:
    """Its port on the loopback interface. It answers /health with `status`, and all else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def exit_code_of_health_check(port: int) -> int:
    [line] = instructions("cpu", "HEALTHCHECK")
    program, *arguments = json.loads(line.partition("CMD ")[2])
    assert program == "python"
    environ = os.environ | {"HEADRACE_PORT": str(port)}
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, timeout=60).returncode


def test_the_health_check_of_the_image_follows_the_health_of_the_server():
    with server_that_answers(200) as port:
        assert exit_code_of_health_check(port) == 0
    with server_that_answers(503) as port:
        assert exit_code_of_health_check(port) == 1
    assert exit_code_of_health_check(port) == 1, "nobody listens any more"


# ------------------------------------------------------------------------------------------------ compose


def test_compose_is_what_its_schema_says():
    validator = jsonschema_rs.validator_for(yaml.safe_load((SCHEMAS / "compose.yaml").read_text()))

    assert messages(validator, COMPOSE) == []
    changed = copy.deepcopy(COMPOSE)
    changed["services"]["headrace"]["port"] = []
    assert not validator.is_valid(changed)
    changed = copy.deepcopy(COMPOSE)
    changed["services"]["headrace"]["ports"] = ["30000:30000"]
    assert not validator.is_valid(changed), "a port that is open to the network"


def test_compose_mounts_files_and_volumes_that_exist():
    mounts = [volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", ())]
    named = {mount for mount in mounts if not mount.startswith("./")}

    assert named == COMPOSE["volumes"].keys()
    assert [mount for mount in mounts if mount.startswith("./") and not (DEPLOY / mount).is_file()] == []


def test_compose_builds_a_target_and_sets_options_that_exist_with_keys_from_outside():
    build = SERVICES["headrace"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert build["target"] in TARGETS
    environ = SERVICES["headrace"]["environment"]
    settings = from_environment(environ, OPTIONS)
    assert settings.notes == []
    assert settings.values.keys() == {name.removeprefix("HEADRACE_").lower() for name in environ}
    for name in ("HEADRACE_API_KEY", "HEADRACE_ADMIN_API_KEY"):
        assert re.fullmatch(rf"\$\{{{name}:\?[^}}]+\}}", environ[name])
    assert [environ["HEADRACE_MODEL_PATH"]] == SERVICES["pull"]["command"]


def target_of(service: str, source: str) -> Path:
    """Where a service has a file that is mounted."""
    return next(Path(volume.split(":")[1]) for volume in SERVICES[service]["volumes"] if volume.split(":")[0] == source)


def test_prometheus_reads_the_server_and_the_alert_rules():
    config = yaml.safe_load((DEPLOY / "compose/prometheus.yaml").read_text())
    place = target_of("prometheus", "./compose/prometheus.yaml")

    assert f"--config.file={place}" in SERVICES["prometheus"]["command"]
    assert [place.parent / name for name in config["rule_files"]] == [target_of("prometheus", "./alerts.yaml")]
    targets = [
        target for job in config["scrape_configs"] for given in job["static_configs"] for target in given["targets"]
    ]
    assert targets == [f"headrace:{variables('cpu')['HEADRACE_PORT']}"]


def test_grafana_finds_prometheus_and_the_dashboard():
    [source] = yaml.safe_load((DEPLOY / "compose/grafana-datasources.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((DEPLOY / "compose/grafana-dashboards.yaml").read_text())["providers"]

    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert Path(provider["options"]["path"]) == target_of("grafana", "./grafana.json").parent
    for kind in ("datasources", "dashboards"):
        place = target_of("grafana", f"./compose/grafana-{kind}.yaml")
        assert place.parent == Path("/etc/grafana/provisioning") / kind

"""The manifests agree with each other and with the code they start."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from epilora.rpc import LIVENESS_SERVICE
from epilora.settings import CommonSettings, GatewaySettings, LoaderSettings, WorkerSettings
from epilora.v1 import loader_service_pb2, worker_service_pb2
from tests.deploy.manifests import KUBECTL, OVERLAYS, ROOT, Deployment, bytes_of, render

SETTINGS: dict[str, type[CommonSettings]] = {
    "workers": WorkerSettings,
    "loader": LoaderSettings,
    "gateway": GatewaySettings,
}
CONTAINERS = list(SETTINGS)


@pytest.fixture(params=OVERLAYS)
def deployment(request: pytest.FixtureRequest) -> Deployment:
    return Deployment.of(request.param)


@pytest.fixture
def settings_of(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that each container's process would read."""
    for name, value in deployment.settings.items():
        monkeypatch.setenv(name, value)
    return {container: cls() for container, cls in SETTINGS.items()}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _pod_of(deployment: Deployment, container: str) -> dict[str, Any]:
    return deployment.pod("Deployment" if container == "gateway" else "StatefulSet")


@pytest.mark.parametrize("directory", ["deploy/volumes", *(f"deploy/overlays/{overlay}" for overlay in OVERLAYS)])
def test_every_object_is_valid_kubernetes(directory: str) -> None:
    rendered = subprocess.run(
        [KUBECTL, "kustomize", ROOT / directory], check=True, capture_output=True, text=True, timeout=60
    )
    validate = Path(sys.executable).parent / "kubernetes-validate"
    checked = subprocess.run(
        [validate, "--strict", "--quiet", "-"],
        check=False,
        input=rendered.stdout,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_variable_is_a_setting_that_some_process_reads(deployment: Deployment) -> None:
    fields = {name.upper() for cls in SETTINGS.values() for name in cls.model_fields}
    unknown = {name for name in deployment.settings if name.removeprefix("EPILORA_") not in fields}
    assert not unknown
    assert all(name.startswith("EPILORA_") for name in deployment.settings)


@pytest.mark.parametrize("container", CONTAINERS)
def test_settings_parse_and_say_what_the_map_says(
    deployment: Deployment, settings_of: dict[str, Any], container: str
) -> None:
    settings = settings_of[container]
    assert str(settings.num_ranks) == deployment.settings["EPILORA_NUM_RANKS"]
    assert str(settings.model) == deployment.settings["EPILORA_MODEL"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_reads_the_map_that_is_deployed(deployment: Deployment, container: str) -> None:
    deployed = deployment.get("ConfigMap")["metadata"]["name"]
    assert deployment.container(container)["envFrom"] == [{"configMapRef": {"name": deployed}}]


def test_the_gateway_dials_the_pod_that_the_workers_run_in(deployment: Deployment, settings_of: dict[str, Any]) -> None:
    workers = deployment.get("StatefulSet")
    pod, service = f"{workers['metadata']['name']}-0", workers["spec"]["serviceName"]
    headless = deployment.get("Service", service)
    assert headless["spec"]["clusterIP"] == "None"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert headless["spec"]["selector"].items() <= workers["spec"]["template"]["metadata"]["labels"].items()
    gateway, worker, loader = (settings_of[name] for name in ("gateway", "workers", "loader"))
    for ep_rank in range(gateway.num_ranks):
        dialled, listened = gateway.worker_address_of(ep_rank), worker.worker_listen_of(ep_rank)
        assert dialled == f"{pod}.{service}:{_port(listened)}"
        assert listened.startswith("0.0.0.0:")
    assert gateway.loader_address_resolved() == f"{pod}.{service}:{_port(loader.loader_listen_resolved())}"


def test_ports_are_those_the_processes_listen_on(deployment: Deployment, settings_of: dict[str, Any]) -> None:
    gateway, worker, loader = (settings_of[name] for name in ("gateway", "workers", "loader"))
    expected = {
        "gateway": {"grpc": _port(gateway.listen), "metrics": _port(gateway.metrics_listen)},
        "workers": {"worker-0": _port(worker.worker_listen_of(0))},
        "loader": {"loader": _port(loader.loader_listen_resolved())},
    }
    for container, ports in expected.items():
        declared = deployment.container(container)["ports"]
        assert {port["name"]: port["containerPort"] for port in declared} == ports, container
    service = deployment.get("Service", "epilora-worker")
    assert {p["name"]: p["port"] for p in service["spec"]["ports"]} == expected["workers"] | expected["loader"]
    public = next(o for o in deployment.objects if o["kind"] == "Service" and o["metadata"]["name"] == "epilora")
    assert {p["targetPort"] for p in public["spec"]["ports"]} == set(expected["gateway"])
    annotations = deployment.get("Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(expected["gateway"]["metrics"])


def test_the_network_lets_the_gateway_reach_every_rank_and_the_loader(
    deployment: Deployment, settings_of: dict[str, Any]
) -> None:
    ports = deployment.get("NetworkPolicy", "epilora-worker")["spec"]["ingress"][0]["ports"]
    allowed = {port for entry in ports for port in range(entry["port"], entry.get("endPort", entry["port"]) + 1)}
    gateway = settings_of["gateway"]
    needed = {_port(gateway.worker_address_of(ep_rank)) for ep_rank in range(gateway.num_ranks)}
    assert needed | {_port(gateway.loader_address_resolved())} <= allowed


@pytest.mark.parametrize("container", CONTAINERS)
def test_probes_ask_for_services_that_exist_on_a_port_that_is_there(deployment: Deployment, container: str) -> None:
    spec = deployment.container(container)
    readiness = {
        "gateway": "",
        "workers": worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
        "loader": loader_service_pb2.DESCRIPTOR.services_by_name["LoaderService"].full_name,
    }[container]
    assert spec["readinessProbe"]["grpc"].get("service", "") == readiness
    assert spec["livenessProbe"]["grpc"]["service"] == LIVENESS_SERVICE
    assert spec["startupProbe"]["grpc"]["service"] in {readiness, LIVENESS_SERVICE}
    ports = {port["containerPort"] for port in spec["ports"]}
    assert all(spec[f"{kind}Probe"]["grpc"]["port"] in ports for kind in ("startup", "readiness", "liveness"))


def test_one_process_a_rank_and_one_gpu_a_process(deployment: Deployment, settings_of: dict[str, Any]) -> None:
    spec = deployment.container("workers")
    assert spec["command"] == ["python", "-m", "compute_worker.launch"]
    gpus = spec["resources"]["limits"].get("nvidia.com/gpu")
    if settings_of["workers"].device == "cpu":
        assert gpus is None
    else:
        assert gpus == str(settings_of["workers"].num_ranks)


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_command_names_a_module_that_exists(deployment: Deployment, container: str) -> None:
    command = deployment.container(container)["command"]
    module = command[len(command) - 1 - command[::-1].index("-m") + 1]
    assert importlib.util.find_spec(module) is not None


def test_the_loader_is_a_native_sidecar_that_shares_memory_with_the_workers(deployment: Deployment) -> None:
    assert deployment.container("loader")["restartPolicy"] == "Always"
    mounts = {
        name: {mount["name"]: mount["mountPath"] for mount in deployment.container(name)["volumeMounts"]}
        for name in ("loader", "workers")
    }
    assert mounts["loader"]["shared-memory"] == mounts["workers"]["shared-memory"] == "/dev/shm"
    volume = next(v for v in deployment.pod("StatefulSet")["volumes"] if v["name"] == "shared-memory")
    assert volume["emptyDir"]["medium"] == "Memory"


def test_the_cache_fits_its_volume_and_the_memory_of_its_container(
    deployment: Deployment, settings_of: dict[str, Any]
) -> None:
    loader = settings_of["loader"]
    volume = next(v for v in deployment.pod("StatefulSet")["volumes"] if v["name"] == "shared-memory")
    size = bytes_of(volume["emptyDir"]["sizeLimit"])
    assert loader.cache_budget_bytes < size
    assert size < bytes_of(deployment.container("loader")["resources"]["limits"]["memory"])


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_path_a_process_uses_lies_on_a_volume(
    deployment: Deployment, settings_of: dict[str, Any], container: str
) -> None:
    spec, pod = deployment.container(container), _pod_of(deployment, container)
    assert {mount["name"] for mount in spec["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    mounted = {Path(mount["mountPath"]): mount.get("readOnly", False) for mount in spec["volumeMounts"]}
    settings = settings_of[container]
    read = [settings.model] if container != "loader" else list(settings.adapter_roots)
    written = {"gateway": ["state_dir"], "loader": ["cache_dir"], "workers": []}[container]
    for path in read:
        assert any(path.is_relative_to(mount) for mount in mounted), path
    for name in written:
        path = getattr(settings, name)
        assert any(path.is_relative_to(mount) and not read_only for mount, read_only in mounted.items()), path
    assert spec["securityContext"]["readOnlyRootFilesystem"] is True


def test_claims_that_pods_use_are_made(deployment: Deployment) -> None:
    made = {o["metadata"]["name"] for o in render("deploy/volumes") if o["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for kind in ("StatefulSet", "Deployment")
        for volume in deployment.pod(kind)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == made
    namespaces = {o["metadata"]["namespace"] for o in deployment.objects}
    assert namespaces == {o["metadata"]["name"] for o in render("deploy/volumes") if o["kind"] == "Namespace"}


@pytest.mark.parametrize("container", CONTAINERS)
def test_pods_are_restricted(deployment: Deployment, container: str) -> None:
    pod, spec = _pod_of(deployment, container), deployment.container(container)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= spec["resources"].get("requests", {}).keys()


def test_the_gateway_has_time_to_drain(deployment: Deployment, settings_of: dict[str, Any]) -> None:
    pod, spec = deployment.pod("Deployment"), deployment.container("gateway")
    pause = spec["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause + settings_of["gateway"].drain_timeout_seconds < pod["terminationGracePeriodSeconds"]


def test_one_gateway_that_never_overlaps_its_successor(deployment: Deployment) -> None:
    spec = deployment.get("Deployment")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_the_image_runs_as_the_user_of_the_pods(deployment: Deployment) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"USER {deployment.pod('Deployment')['securityContext']['runAsUser']}:" in dockerfile
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    checked = subprocess.run(
        [hadolint, "Dockerfile"], check=False, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout

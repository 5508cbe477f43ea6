"""The manifests: valid by the published schemas, and right about what Penstock is: paths, names, times, users."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.config import FrontendOptions
from penstock.config.api_keys import KEY_VARIABLE
from penstock.config.flags import flags
from penstock.core.launch.engine import END_GRACE
from penstock.frontend.http.routes import ROUTES
from tests.deploy.kustomize import Object, build
from tests.docs.fences import ROOT
from tests.docs.metric_names import metric_names

FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.parent for path in FOLDER.rglob("kustomization.yaml") if "components" not in path.parts)
IS_SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
VERSIONS = ("1.34", kubernetes_validate.latest_version()) if IS_SOAK else ("1.34",)
"""The oldest with `sleep` hooks for everybody, and the latest that the schemas' package has."""
OWN_KINDS = ("serving.kserve.io/", "inference.networking.k8s.io/", "gateway.networking.k8s.io/")
"""Of others than Kubernetes itself: it has no schemas for them."""
WRITE_GRACE = 10.0  # of the scheduler for pages that are to be written (core/launch/engine.py)


def name_of(folder: Path) -> str:
    return str(folder.relative_to(FOLDER))


def containers(objects: list[Object]) -> list[tuple[Object, Object]]:
    """Each pod's spec with its container."""
    specs = [each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Deployment", "StatefulSet")]
    specs += [each["spec"] for each in objects if each["kind"] == "ClusterServingRuntime"]
    return [(spec, container) for spec in specs for container in spec["containers"]]


def everything() -> list[tuple[Object, Object]]:
    found = [pair for folder in OVERLAYS for pair in containers(build(folder))]
    assert found
    return found


@pytest.mark.parametrize("folder", OVERLAYS, ids=name_of)
def test_objects_are_valid(folder: Path) -> None:
    for each in build(folder):
        if each["apiVersion"].startswith(OWN_KINDS):
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


def test_a_field_that_does_not_exist_is_found() -> None:
    [deployment] = [each for each in build(FOLDER / "base") if each["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("folder", OVERLAYS, ids=name_of)
def test_kubectl_builds_the_same(folder: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which is not there; the reader of these tests has no second opinion")
    built = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=True).stdout

    def by_name(objects: Any) -> dict[tuple[str, str], Any]:
        return {(each["kind"], each["metadata"]["name"]): _sorted(each) for each in objects if each}

    assert by_name(build(folder)) == by_name(yaml.safe_load_all(built))


def _sorted(value: Any) -> Any:
    """Without the order of entries that have names: kustomize puts new ones first."""
    if isinstance(value, dict):
        return {key: _sorted(each) for key, each in value.items()}
    if isinstance(value, list):
        found = [_sorted(each) for each in value]
        return (
            sorted(found, key=lambda e: e["name"]) if all(isinstance(e, dict) and "name" in e for e in found) else found
        )
    return value


def test_names_in_manifests_exist() -> None:
    """Options, variables and metrics."""
    variables = {flag.variable for flag in flags()} | {KEY_VARIABLE}
    options = {flag.name for flag in flags()}
    for _, container in everything():
        for entry in container["env"]:
            assert entry["name"] in variables | {"HF_TOKEN", "HF_HUB_OFFLINE"}, entry["name"]
        for word in container["args"]:
            assert not word.startswith("--") or word.split("=")[0] in options, word
    text = "".join(path.read_text() for path in FOLDER.rglob("*.yaml"))
    asked = set(re.findall(r"\bpenstock_[a-z_]+", text))
    assert {"penstock_num_requests_waiting", "penstock_kv_cache_usage_perc", "penstock_cache_config_info"} <= asked
    assert asked <= metric_names()


def test_probes_ask_for_what_they_mean() -> None:
    meant = {"startupProbe": "ready", "livenessProbe": "health", "readinessProbe": "ready"}
    handlers = {path: route.handler.__name__ for route in ROUTES for path in route.paths if not route.scope}
    names = {"health": {"health", "live"}, "ready": {"ready"}}
    for _, container in everything():
        ports = {port.get("name", port["containerPort"]): port["containerPort"] for port in container["ports"]}
        for probe, meaning in meant.items():
            asked = container[probe]["httpGet"]
            assert handlers[asked["path"]] in names[meaning]  # and needs no key
            assert asked["port"] in ports
        assert container["livenessProbe"]["timeoutSeconds"] >= 2
        slowest = container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"]
        assert slowest >= 1800  # a large model that is downloaded


def test_pods_get_the_time_to_let_streams_finish() -> None:
    service = yaml.safe_load((FOLDER / "kserve/inference-service.yaml").read_text())["spec"]["predictor"]
    for spec, container in everything():
        told = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        drain = float(told.get("PENSTOCK_SHUTDOWN_TIMEOUT") or FrontendOptions().shutdown_timeout)
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = spec.get("terminationGracePeriodSeconds", service["terminationGracePeriodSeconds"])
        assert before >= 5
        # frontends drain; then the scheduler writes pages, and all processes end
        assert grace >= before + drain + END_GRACE + (END_GRACE + WRITE_GRACE) + END_GRACE


def test_pods_may_do_little() -> None:
    for spec, container in everything():
        own = container["securityContext"]
        pod = spec.get("securityContext", {})
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert (own | pod)["runAsNonRoot"] is True
        assert (own | pod)["seccompProfile"] == {"type": "RuntimeDefault"}
        dockerfile = (ROOT / "Dockerfile").read_text()
        assert f"--uid {(own | pod)['runAsUser']} " in dockerfile
        limits = container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(limits)  # the number of threads is the limit of the processor
        assert container["resources"]["requests"]["memory"] == limits["memory"]
        writable = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/dev/shm"} <= writable
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("folder", OVERLAYS, ids=name_of)
def test_objects_find_each_other(folder: Path) -> None:
    objects = build(folder)
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in objects if each["kind"] == "Deployment"]
    ports = {port.get("name") for _, container in containers(objects) for port in container["ports"]}
    numbers = {port["containerPort"] for _, container in containers(objects) for port in container["ports"]}
    for each in objects:
        spec = each.get("spec", {})
        match each["kind"]:
            case "Service":
                assert any(spec["selector"].items() <= labels.items() for labels in pods)
                assert {port["targetPort"] for port in spec["ports"]} <= ports
            case "Deployment" | "PodDisruptionBudget":
                wanted = spec["selector"]["matchLabels"]
                assert any(wanted.items() <= labels.items() for labels in pods)
            case "NetworkPolicy":
                assert any(spec["podSelector"]["matchLabels"].items() <= labels.items() for labels in pods)
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports
            case "InferencePool":
                assert any(spec["selector"]["matchLabels"].items() <= labels.items() for labels in pods)
                assert {port["number"] for port in spec["targetPorts"]} <= numbers
            case "HorizontalPodAutoscaler":
                target = spec["scaleTargetRef"]
                assert (target["kind"], target["name"]) in {(o["kind"], o["metadata"]["name"]) for o in objects}
                deployment = next(o for o in objects if o["kind"] == target["kind"])
                assert "replicas" not in deployment["spec"]  # the autoscaler's to say
    claims = {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"}
    for pod, _ in containers(objects):
        used = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert used == claims


def test_without_keys_only_behind_a_gateway() -> None:
    for folder in OVERLAYS:
        for _, container in containers(build(folder)):
            variables = {entry["name"] for entry in container["env"]}
            is_open = "PENSTOCK_INSECURE_BIND" in variables
            assert is_open == (name_of(folder) in ("gateway", "kserve"))
            assert is_open != (KEY_VARIABLE in variables)


def test_pods_can_have_as_many_rows_as_the_autoscaler_waits_for() -> None:
    """Pods are added while some rows are free; a pod with fewer rows than the target would never be busy enough."""
    objects = build(FOLDER / "overlays" / "autoscaled")
    [scaler] = [each for each in objects if each["kind"] == "HorizontalPodAutoscaler"]
    targets = {its["pods"]["metric"]["name"]: its["pods"]["target"] for its in scaler["spec"]["metrics"]}
    [(_, container)] = containers(objects)
    rows = {entry["name"]: entry.get("value") for entry in container["env"]}["PENSTOCK_MAX_NUM_SEQS"]
    assert int(targets["penstock_num_requests_running"]["averageValue"]) == 0.75 * int(str(rows))


def test_the_readings_of_the_endpoint_picker() -> None:
    """A gauge for each, without labels of an engine in a pod with one, and block_size and num_gpu_blocks as labels."""
    [text] = [each["data"]["config.yaml"] for each in build(FOLDER / "gateway") if each["kind"] == "ConfigMap"]
    plugins = {plugin["type"]: plugin.get("parameters", {}) for plugin in yaml.safe_load(text)["plugins"]}
    [engine] = plugins["core-metrics-extractor"]["engineConfigs"]
    assert plugins["core-metrics-extractor"]["defaultEngine"] == engine["name"]
    assert {name for name in engine if name.endswith("Spec")} == {
        "queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec",
    }  # fmt: skip
    assert {value for key, value in engine.items() if key.endswith("Spec") and value} <= metric_names()


# --- KServe's own objects ---------------------------------------------------------------------------


@pytest.mark.skipif(not IS_SOAK, reason="fetches KServe's package: PENSTOCK_SOAK=1")
def test_kserve_knows_the_fields(tmp_path: Path) -> None:
    """Against the models of the package `kserve`, read without being imported: it needs much else."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), "kserve==0.21.0"]
    subprocess.run(command, check=True)
    models = {path.stem: path for path in (tmp_path / "kserve/models").glob("*.py")}

    def fields(kind: str) -> dict[str, str] | None:
        """The fields of a model and their types, by their names in YAML; None for Kubernetes' own."""
        stem = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        path = models.get(stem)
        if path is None:
            return None
        told = {}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                told[node.targets[0].id] = node.value
        types, names = (ast.literal_eval(told[key]) for key in ("openapi_types", "attribute_map"))
        return {names[key]: kind for key, kind in types.items()}

    def check(value: Any, kind: str, where: str) -> int:
        if (inner := re.fullmatch(r"list\[(.+)\]", kind)) is not None:
            assert isinstance(value, list), where
            return sum(check(each, inner[1], where) for each in value)
        known = fields(kind)
        if known is None or not isinstance(value, dict):
            return 1
        assert set(value) <= set(known), f"{where}: {kind} has no {set(value) - set(known)}"
        return sum(check(each, known[name], f"{where}.{name}") for name, each in value.items())

    runtime = yaml.safe_load((FOLDER / "kserve/cluster-serving-runtime.yaml").read_text())
    service = yaml.safe_load((FOLDER / "kserve/inference-service.yaml").read_text())
    assert check(runtime, "V1alpha1ClusterServingRuntime", "runtime") > 10
    assert check(service, "V1beta1InferenceService", "service") > 5
    assert service["spec"]["predictor"]["model"]["runtime"] == runtime["metadata"]["name"]

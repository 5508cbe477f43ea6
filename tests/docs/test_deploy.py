"""The files for containers: every option reaches its service, and the dashboard asks for metrics that exist."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from penstock.config.api_keys import KEY_VARIABLE
from penstock.config.flags import flags
from penstock.config.part_options import part_options
from tests.docs.fences import ROOT
from tests.docs.metric_names import metric_names
from tests.packaging import data, packages

NOT_IN_CONTAINERS = {
    "model",  # an argument of the commands
    "host", "port", "admin_port",  # the services' own
    "frontend_address", "worker_address", "runtime_dir", "channel_key_file",
    "num_frontends",  # --scale frontend=2
    "spare_worker",  # the supervisor's
    "chat_template", "api_keys_file", "tls_certificate", "tls_key",  # files outside the container
    "step_trace", "profile", "record", "record_prompts", "access_log",
}  # fmt: skip
SERVICE_OF = {
    "model": ("frontend", "worker"),
    "scheduler": ("scheduler",),
    "worker": ("worker",),
    "frontend": ("frontend",),
}


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Knows Compose's own tags."""


Loader.add_constructor("!reset", lambda loader, node: [])


def test_every_option_reaches_its_service() -> None:
    services = yaml.load((ROOT / "compose.yaml").read_text(), Loader)["services"]
    for flag in flags():
        group = part_options()[flag.group].beside if flag.group in part_options() else flag.group
        if flag.field in NOT_IN_CONTAINERS or group not in SERVICE_OF:
            continue
        takers = SERVICE_OF[group]
        assert any(flag.variable in services[name]["environment"] for name in takers), f"{flag.variable} goes nowhere"


def test_the_example_names_variables_that_exist() -> None:
    known = {flag.variable for flag in flags()} | {KEY_VARIABLE}
    known |= {"PENSTOCK_MODEL_DIR", "PENSTOCK_DISK_KV_GIB", "PENSTOCK_HTTP_ADDRESS", "GRAFANA_ADDRESS", "HF_TOKEN"}
    known |= {"FRONTEND_MEMORY", "SCHEDULER_MEMORY", "WORKER_MEMORY"}
    text = (ROOT / "deploy" / "env.example").read_text()
    assert set(re.findall(r"^#?([A-Z_]+)=", text, flags=re.MULTILINE)) <= known


def test_every_mounted_file_is_there() -> None:
    for name in ("compose.yaml", "compose.scale.yaml"):
        services = yaml.load((ROOT / name).read_text(), Loader)["services"]
        for service in services.values():
            for volume in service.get("volumes", []):
                if volume.startswith("./"):
                    assert (ROOT / volume.split(":")[0]).exists(), volume


def test_a_named_model_is_downloaded_once_into_a_volume() -> None:
    """By a service of its own; those that serve only read the cache, and ask no hub."""
    compose = yaml.load((ROOT / "compose.yaml").read_text(), Loader)
    services, dockerfile = compose["services"], (ROOT / "Dockerfile").read_text()
    assert "models" in compose["volumes"]
    assert "HF_HOME=/cache" in dockerfile
    assert "install -d -o penstock -m 700 /keys /cache" in dockerfile  # what a new volume takes over
    assert "models:/cache" in services["model"]["volumes"]
    assert services["model"]["command"][:2] == ["models", "--download"]
    for name in ("frontend", "worker"):
        assert "models:/cache:ro" in services[name]["volumes"]
        assert services[name]["environment"]["HF_HUB_OFFLINE"] == "1"
        assert services[name]["command"][-1] == services["model"]["command"][-1]
        assert services[name]["depends_on"]["model"] == {"condition": "service_completed_successfully"}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/penstock.json").read_text())
    asked = {name for p in dashboard["panels"] for t in p["targets"] for name in re.findall(r"penstock_\w+", t["expr"])}
    assert asked
    assert asked <= metric_names()


def test_every_service_of_ours_is_bounded() -> None:
    """In processes, memory and privileges."""
    services = yaml.load((ROOT / "compose.yaml").read_text(), Loader)["services"]
    for name in ("frontend", "scheduler", "worker"):
        assert services[name]["pids_limit"] == 1024
        assert services[name]["mem_limit"]
        assert (services[name]["cap_drop"], services[name]["read_only"]) == (["ALL"], True)


def test_the_image_is_built_from_all_packages() -> None:
    folders = {folder.relative_to(ROOT) for folder in packages().values()} | {file.relative_to(ROOT) for file in data()}
    brought = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {folder for folder in folders if not any(folder.is_relative_to(each) for each in brought)} == set()


def test_the_image_does_not_open_itself_to_everybody() -> None:
    [command] = re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert json.loads(command) == [
        "serve",
        "--host",
        "0.0.0.0",
    ]  # refused without keys: tests/frontend/http/test_listening.py


def test_prometheus_looks_for_the_frontends_where_they_listen() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    [found] = config["scrape_configs"][0]["dns_sd_configs"]
    assert (found["names"], found["port"]) == (["frontend"], 8000)
    for path in (ROOT / "deploy/grafana/provisioning").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def _has_compose() -> bool:
    docker = shutil.which("docker")
    return docker is not None and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode


needs_compose = pytest.mark.skipif(not _has_compose(), reason="needs docker with Compose (no engine)")


@needs_compose
@pytest.mark.parametrize("more", [[], ["compose.gpu.yaml"], ["compose.scale.yaml"], ["compose.multi.yaml"]], ids=str)
def test_compose_understands_the_files(more: list[str]) -> None:
    files = [argument for name in ["compose.yaml", *more] for argument in ("-f", name)]
    command = ["docker", "compose", *files, "--profile", "monitoring", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    published = [name for name, service in services.items() if service.get("ports")]
    is_behind_proxy = more in (["compose.scale.yaml"], ["compose.multi.yaml"])
    assert set(published) == {"grafana", "proxy" if is_behind_proxy else "frontend"}


@needs_compose
def test_two_engines_are_alike_and_stopped_after_their_frontends() -> None:
    command = ["docker", "compose", "-f", "compose.yaml", "-f", "compose.multi.yaml", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    services = json.loads(done.stdout)["services"]
    assert services["frontend"]["scale"] == 2
    assert services["frontend"]["command"][2] == "tcp://scheduler:5551,tcp://scheduler-1:5551"
    assert {"scheduler", "scheduler-1"} <= services["frontend"]["depends_on"].keys()
    for one, other in (("scheduler", "scheduler-1"), ("worker", "worker-1")):
        first, second = services[one], services[other]
        for field in ("healthcheck", "volumes", "cap_drop", "read_only", "pids_limit", "mem_limit", "networks"):
            assert first.get(field) == second.get(field), field
        different = {name for name in first["environment"] if first["environment"][name] != second["environment"][name]}
        assert not different
    assert "scheduler" in services["worker"]["depends_on"]
    assert "scheduler-1" in services["worker-1"]["depends_on"]
    assert services["worker-1"]["command"][2] == "tcp://scheduler-1:5552"

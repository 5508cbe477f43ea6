"""Reads what kustomize would build, as far as our overlays use it: resources, components, namespace, labels, patches.

Where `kubectl` is there, a test compares the two.
"""

from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
KNOWN = {"apiVersion", "kind", "resources", "components", "namespace", "labels", "patches"}
_BY_NAME = {"containers", "env", "volumes", "ports", "volumeMounts"}
"""Lists whose entries patches find by a key, as Kubernetes declares it."""
_KEYS = {"ports": "containerPort", "volumeMounts": "mountPath"}
_CLUSTERWIDE = {"ClusterServingRuntime"}


def build(folder: Path) -> list[Object]:
    """The objects of a folder's kustomization."""
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(settings) <= KNOWN, f"{folder}: this reader does not know {set(settings) - KNOWN}"
    objects: list[Object] = []
    for name in settings.get("resources", ()):
        path = folder / name
        if path.is_dir():
            objects += build(path)
        else:
            objects += [each for each in yaml.safe_load_all(path.read_text()) if each]
    for name in settings.get("components", ()):
        part = yaml.safe_load((folder / name / "kustomization.yaml").read_text())
        assert set(part) <= {"apiVersion", "kind", "patches"}
        objects = _patched(objects, part["patches"])
    objects = _patched(objects, settings.get("patches", ()))
    for each in objects:
        if "namespace" in settings and each["kind"] not in _CLUSTERWIDE:
            each["metadata"]["namespace"] = settings["namespace"]
        for labels in settings.get("labels", ()):
            _add(each["metadata"], labels["pairs"])
            if labels.get("includeTemplates") and "template" in each.get("spec", {}):
                _add(each["spec"]["template"].setdefault("metadata", {}), labels["pairs"])
    return objects


def _add(metadata: Object, pairs: dict[str, str]) -> None:
    metadata["labels"] = metadata.get("labels", {}) | pairs


def _patched(objects: list[Object], patches: Any) -> list[Object]:
    for entry in patches:
        patch = yaml.safe_load(entry["patch"])
        found = [o for o in objects if o["kind"] == entry["target"]["kind"]]
        found = [o for o in found if o["metadata"]["name"] == entry["target"]["name"]]
        assert len(found) == 1, f"a patch for {entry['target']} meets {len(found)} objects"
        if patch.pop("$patch", "") == "delete":
            objects = [o for o in objects if o is not found[0]]
        else:
            merged = _merged(found[0], patch)
            objects = [merged if o is found[0] else o for o in objects]
    return objects


def _merged(old: Any, new: Any, name: str = "") -> Any:
    """A strategic merge."""
    if isinstance(old, dict) and isinstance(new, dict):
        result = dict(old)
        for key, value in new.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = _merged(result.get(key), value, key)
        return result
    if isinstance(old, list) and name in _BY_NAME:
        key = _KEYS.get(name, "name")
        result_list = list(old)
        for entry in new:
            at = next((i for i, each in enumerate(result_list) if each[key] == entry[key]), None)
            if entry.get("$patch") == "delete":
                assert at is not None, f"{entry[key]} is not there"
                del result_list[at]
            elif at is None:
                result_list.insert(0, entry)
            else:
                result_list[at] = _merged(result_list[at], entry)
        return result_list
    return new

"""Renders a kustomize overlay and finds things in it."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "deploy" / "overlays").iterdir())
KUBECTL = Path(sys.executable).parent / "kubectl"


@functools.cache
def render(directory: str) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k` would send."""
    rendered = subprocess.run(
        [KUBECTL, "kustomize", ROOT / directory], check=True, capture_output=True, text=True, timeout=60
    )
    return list(yaml.safe_load_all(rendered.stdout))


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """The objects of one overlay."""

    objects: list[dict[str, Any]]

    @classmethod
    def of(cls, overlay: str) -> Deployment:
        """Renders an overlay."""
        return cls(objects=render(f"deploy/overlays/{overlay}"))

    def get(self, kind: str, name: str = "") -> dict[str, Any]:
        """The one object of a kind and, if given, a name (kustomize's hash aside)."""
        found = [o for o in self.objects if o["kind"] == kind and o["metadata"]["name"].startswith(name)]
        assert len(found) == 1, (kind, name, [o["metadata"]["name"] for o in found])
        return found[0]

    def pod(self, kind: str) -> dict[str, Any]:
        """The pod spec of the StatefulSet or the Deployment."""
        spec: dict[str, Any] = self.get(kind)["spec"]["template"]["spec"]
        return spec

    def container(self, name: str) -> dict[str, Any]:
        """A container, sidecars included, by name."""
        pods = [self.pod("StatefulSet"), self.pod("Deployment")]
        found = [c for pod in pods for c in [*pod.get("initContainers", []), *pod["containers"]] if c["name"] == name]
        assert len(found) == 1, name
        return dict(found[0])

    @property
    def settings(self) -> dict[str, str]:
        """The ConfigMap's variables."""
        data: dict[str, str] = self.get("ConfigMap")["data"]
        return data


def bytes_of(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as 6Gi."""
    units = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
    return int(quantity[:-2]) << units[quantity[-2:]]

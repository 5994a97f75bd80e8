"""Devices that differ, and options that divide work over them."""

from __future__ import annotations

from typing import Any

from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.options import Options


def topology(*speeds: float, **more: Any) -> Topology:
    """Devices of these relative speeds."""
    devices = [{"flops": s * 1e10, "memory_bandwidth": s * 5e9, "launch": 1e-6} for s in speeds]
    return Topology.of({"device": [{**device, **more} for device in devices]})


def options(mesh: str, preset: str | None, devices: Topology, balance: bool = True) -> Options:
    """Options for a preset, or for the search; verifying."""
    search = None if preset else "auto"
    return Options(
        mesh=Mesh.parse(mesh),
        preset=preset,
        search=search,
        topology=devices,
        balance=balance,
        check_layouts=True,
    )

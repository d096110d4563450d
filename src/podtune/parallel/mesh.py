"""The mesh: how the devices there are become data x fsdp x tensor. Everything sharded is sharded over its axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from podtune.config.errors import UserError
from podtune.config.schema import Mesh as MeshSettings
from podtune.config.wording import counted

AXES = ("data", "fsdp", "tensor")
# A frozen model up to this share of a device's memory is copied to every device; a larger one is split.
_COPIED_SHARE = 0.3


def build_mesh(
    request: MeshSettings,
    devices: Sequence[Any] | None = None,
    *,
    method: Literal["full", "lora"] = "lora",
    weight_bytes: int = 0,
) -> Mesh:
    """The mesh of the run over these devices (all of them by default).

    Where data and fsdp are both auto: full fine-tuning splits weights and moments over all devices (fsdp); LoRA keeps
    a copy of a small model on each (data), and splits a model that would fill them. Raises UserError when the axes do
    not multiply to the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    count = len(devices)
    if count % request.tensor:
        raise UserError(
            f"mesh.tensor={request.tensor} does not divide {counted(count, 'device')}. Use one of {_divisors(count)}."
        )
    rest = count // request.tensor
    data, fsdp = request.data, request.fsdp
    if data == "auto" and fsdp == "auto":
        data, fsdp = (1, rest) if _is_split(method, weight_bytes, own_device(devices)) else (rest, 1)
    elif data == "auto":
        data = max(1, rest // int(fsdp))
    elif fsdp == "auto":
        fsdp = max(1, rest // data)
    data, fsdp = int(data), int(fsdp)
    if data * fsdp * request.tensor != count:
        raise UserError(
            f"mesh data={data} x fsdp={fsdp} x tensor={request.tensor} makes {data * fsdp * request.tensor}, and there "
            f"{'is' if count == 1 else 'are'} {counted(count, 'device')}. Leave one of data and fsdp at auto, or "
            f"choose divisors of {count}: {_divisors(count)}."
        )
    return jax.make_mesh((data, fsdp, request.tensor), AXES, devices=devices, axis_types=(AxisType.Auto,) * 3)


def stated_mesh(request: MeshSettings) -> AbstractMesh:
    """The mesh as far as the run file states it, before there are devices. An axis that is auto may turn out larger,
    so what does not divide here will not divide then."""
    sizes = [1 if size == "auto" else size for size in (request.data, request.fsdp, request.tensor)]
    return AbstractMesh(tuple(sizes), AXES)


def platform_of(mesh: Mesh) -> str:
    """cpu, gpu or tpu."""
    return mesh.devices.flat[0].platform


def on_cpu(mesh: Mesh) -> bool:
    """Whether the devices of a mesh are CPUs, which share one memory and compute best in float32."""
    return platform_of(mesh) == "cpu"


def own_device(devices: Sequence[Any]) -> Any:
    """The first of these devices that this process holds: the memory of others' cannot be asked for."""
    mine = [device for device in devices if device.process_index == jax.process_index()]
    return mine[0] if mine else devices[0]


def describe_mesh(mesh: Mesh) -> str:
    """Such as `8 TPU v5 lite devices: data=1 x fsdp=8 x tensor=1`."""
    device = mesh.devices.flat[0]
    kind = device.device_kind if device.device_kind.lower() != device.platform else device.platform.upper()
    axes = " x ".join(f"{name}={mesh.shape[name]}" for name in AXES)
    return f"{mesh.size} {kind} {'device' if mesh.size == 1 else 'devices'}: {axes}"


def _is_split(method: str, weight_bytes: int, device: Any) -> bool:
    if method == "full":
        return True
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    return bool(memory) and weight_bytes > _COPIED_SHARE * memory


def _divisors(count: int) -> str:
    return ", ".join(str(ways) for ways in range(1, count + 1) if count % ways == 0)

"""Which devices to run on: TPU, then GPU, then CPU, with the reason said. Used by every command that computes, and by
`podtune doctor`.

`survey` looks at device files and installed libraries alone: it imports no jax, opens no device and asks no network, so
it cannot hang. `choose_platform` starts the backend that the survey promises.
"""

import ctypes
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podtune.config.errors import RunFailure

PlatformName = Literal["tpu", "gpu", "cpu"]

GOOGLE_PCI_VENDOR = "0x1ae0"
NVIDIA_PCI_VENDOR = "0x10de"
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True)
class Evidence:
    """What the machine shows of one kind of accelerator."""

    platform: PlatformName
    found: tuple[str, ...]
    """Device files, PCI devices, drivers and libraries that are there."""
    missing: tuple[str, ...]
    """What is not there and would have to be, with the way to get it."""
    hardware: bool
    """Whether the accelerator itself shows."""

    @property
    def usable(self) -> bool:
        """Whether starting it should work."""
        return self.hardware and not self.missing

    def __str__(self) -> str:
        name, found, missing = self.platform.upper(), ", ".join(self.found), "; ".join(self.missing)
        if not self.hardware:
            return f"no {name}: {missing}"
        if self.missing:
            return f"{name} hardware is here ({found}) but cannot be used: {missing}"
        return f"{name} found: {found}"


@dataclass(frozen=True)
class Chosen:
    """The platform that computes, and why."""

    platform: PlatformName
    device_count: int
    device_kind: str
    reason: str

    def __str__(self) -> str:
        devices = f"{self.device_count} x {self.device_kind}" if self.device_count > 1 else self.device_kind
        return f"{self.platform.upper()} ({devices}): {self.reason}"


def core_count(root: Path = Path("/")) -> int:
    """Processor cores that this process may use: less than the machine has under taskset or in a container.

    root: where `sys` is looked for.
    """
    # Linux alone knows which cores are allowed; macOS has no such call.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")  # microseconds; "max" for no limit
    return min(allowed, max(1, math.ceil(int(quota) / int(period)))) if quota.isdigit() else allowed


def survey(root: Path = Path("/")) -> tuple[Evidence, Evidence]:
    """What shows of a TPU and of a GPU. root: where `dev`, `proc` and `sys` are looked for."""
    return _survey_tpu(root), _survey_gpu(root)


def _survey_tpu(root: Path) -> Evidence:
    files = [
        str(path)
        for path in (*sorted((root / "dev").glob("accel*")), *sorted((root / "dev/vfio").glob("[0-9]*")))
        if path.name != "accel"
    ]
    chips = _pci_devices(root, GOOGLE_PCI_VENDOR)
    # A vfio group may hold any device: it shows a TPU only beside Google's PCI vendor or a TPU VM's environment.
    on_tpu_host = chips > 0 or any(name in os.environ for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID"))
    hardware = bool(chips) or any("/accel" in file for file in files) or (bool(files) and on_tpu_host)
    found = list(files) if hardware else []
    if chips:
        found.append(f"{chips} Google PCI device{'s' if chips > 1 else ''}")
    missing: list[str] = []
    if not hardware:
        missing.append("no /dev/accel*, no /dev/vfio device and no Google PCI device")
    elif not files:
        missing.append("no /dev/accel* or /dev/vfio/* file (in a container, pass the device through)")
    if importlib.util.find_spec("libtpu") is not None:
        found.append("libtpu")
    elif hardware:
        missing.append("libtpu is not installed: pip install 'podtune[tpu]'")
    return Evidence("tpu", tuple(found), tuple(missing), hardware)


def _survey_gpu(root: Path) -> Evidence:
    files = [str(path) for path in sorted((root / "dev").glob("nvidia[0-9]*"))]
    if (root / "dev/dxg").exists():
        files.append(str(root / "dev/dxg"))
    cards = _pci_devices(root, NVIDIA_PCI_VENDOR)
    hardware = bool(files) or cards > 0
    found = list(files)
    missing: list[str] = []
    if cards:
        found.append(f"{cards} NVIDIA PCI device{'s' if cards > 1 else ''}")
    version = _read(root / "proc/driver/nvidia/version")
    driver = re.search(r"Kernel Module\D*([\d.]+)", version)
    if driver:
        found.append(f"driver {driver[1]}")
    if not hardware:
        missing.append("no /dev/nvidia* and no NVIDIA PCI device")
        return Evidence("gpu", tuple(found), tuple(missing), hardware)
    if not files:
        missing.append("no /dev/nvidia* file: the NVIDIA driver is not loaded (in a container, pass the GPU through)")
    if _loads("libcuda.so.1"):
        found.append("libcuda.so.1")
    else:
        missing.append("libcuda.so.1 cannot be loaded: install the NVIDIA driver's libraries")
    plugin = next((name for name in CUDA_PLUGINS if importlib.util.find_spec(name) is not None), None)
    if plugin is not None:
        found.append(plugin)
    else:
        missing.append("jax's CUDA plugin is not installed: pip install 'podtune[cuda]'")
    return Evidence("gpu", tuple(found), tuple(missing), hardware)


def _pci_devices(root: Path, vendor: str) -> int:
    return sum(_read(path).strip() == vendor for path in (root / "sys/bus/pci/devices").glob("*/vendor"))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def choose_platform(environment: Mapping[str, str] = os.environ) -> Chosen:
    """Starts jax on the best platform there is and says which and why. JAX_PLATFORMS, when set, is obeyed.

    Call it before anything computes, and after jax.distributed has started. Raises RunFailure when the platform that
    JAX_PLATFORMS names does not start.
    """
    import jax

    evidence = survey()
    asked = environment.get("JAX_PLATFORMS", "")
    if asked:
        try:
            devices = jax.devices()
        except RuntimeError as error:
            said = f"JAX_PLATFORMS={asked} does not start: {_first_line(error)}"
            raise RunFailure(f"{said}. {'; '.join(map(str, evidence))}. Unset it, or run `podtune doctor`.") from error
        unused = [one for one in evidence if one.hardware and one.platform != devices[0].platform]
        although = "".join(f" (although {one})" for one in unused)
        return _chosen(devices, f"JAX_PLATFORMS={asked} asks for it{although}")
    reasons: list[str] = []
    for one in evidence:
        if not one.usable:
            reasons.append(str(one))
            continue
        try:
            devices = jax.devices(one.platform)
        except RuntimeError as error:
            reasons.append(f"{one}, but it does not start: {_first_line(error)}")
            continue
        return _chosen(devices, "; ".join([str(one), *reasons]))
    return _chosen(_cpu_devices(), "; ".join(reasons))


def _cpu_devices() -> list[Any]:
    """The CPU's devices, whatever else failed to start."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    return jax.devices("cpu")


def _chosen(devices: list[Any], reason: str) -> Chosen:
    platform = devices[0].platform
    named: PlatformName = "tpu" if platform == "tpu" else "cpu" if platform == "cpu" else "gpu"
    return Chosen(named, len(devices), devices[0].device_kind, reason)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

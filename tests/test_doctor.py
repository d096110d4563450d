"""The choice of devices, and what doctor says of a machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from podtune.cli import doctor
from podtune.parallel import devices


def machine(root: Path, *files: str, vendor: str | None = None) -> Path:
    """A root folder with these device files and a PCI device of that vendor."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    if vendor is not None:
        card = root / "sys/bus/pci/devices/0000:00:04.0/vendor"
        card.parent.mkdir(parents=True)
        card.write_text(vendor + "\n")
    return root


@pytest.fixture
def installed(monkeypatch):
    """Chooses which modules and libraries seem to be installed."""

    def choose(*names: str) -> None:
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object() if name in names else None)
        monkeypatch.setattr(devices, "_loads", lambda library: library in names)

    choose()
    for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    return choose


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000\n", 8), ("250000 100000\n", 3), ("5000 100000\n", 1), (None, 8)]
)
def test_a_container_counts_the_cores_it_may_use_and_not_those_of_its_machine(limit, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    if limit is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(limit)
    assert devices.core_count(tmp_path) == cores


def test_cores_are_counted_on_systems_that_cannot_say_which_are_allowed(tmp_path, monkeypatch):
    monkeypatch.delattr(devices.os, "sched_getaffinity", raising=False)  # macOS
    assert devices.core_count(tmp_path) == (devices.os.cpu_count() or 1)


def test_a_machine_without_accelerators_says_what_was_looked_for(tmp_path, installed):
    tpu, gpu = devices.survey(machine(tmp_path))
    assert not tpu.usable
    assert not gpu.usable
    assert str(tpu) == "no TPU: no /dev/accel*, no /dev/vfio device and no Google PCI device"
    assert str(gpu) == "no GPU: no /dev/nvidia* and no NVIDIA PCI device"


@pytest.mark.parametrize("files", [("dev/accel0", "dev/accel1"), ("dev/vfio/0", "dev/vfio/vfio")])
def test_a_tpu_is_usable_with_its_device_files_and_libtpu(tmp_path, installed, files):
    root = machine(tmp_path, *files, vendor="0x1ae0")
    assert "libtpu is not installed: pip install 'podtune[tpu]'" in str(devices.survey(root)[0])
    installed("libtpu")
    assert devices.survey(root)[0].usable


def test_a_vfio_device_alone_is_not_taken_for_a_tpu(tmp_path, installed, monkeypatch):
    root = machine(tmp_path, "dev/vfio/12")
    assert not devices.survey(root)[0].hardware
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    assert devices.survey(root)[0].hardware


def test_a_gpu_says_which_of_driver_library_and_plugin_is_missing(tmp_path, installed):
    root = machine(tmp_path, vendor="0x10de")
    said = str(devices.survey(root)[1])
    assert "the NVIDIA driver is not loaded" in said
    assert "libcuda.so.1 cannot be loaded" in said
    assert "pip install 'podtune[cuda]'" in said
    machine(tmp_path, "dev/nvidia0", "dev/nvidiactl")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n")
    installed("libcuda.so.1", "jax_cuda13_plugin")
    gpu = devices.survey(root)[1]
    assert gpu.usable
    assert "driver 570.86.15" in str(gpu)


def test_the_platform_that_is_asked_for_is_obeyed_and_said():
    chosen = devices.choose_platform({"JAX_PLATFORMS": "cpu"})
    assert (chosen.platform, chosen.device_count) == ("cpu", 8)
    assert str(chosen) == "CPU (8 x cpu): JAX_PLATFORMS=cpu asks for it"


def test_an_accelerator_that_does_not_start_is_said_and_the_cpu_taken(monkeypatch):
    evidence = devices.Evidence("tpu", ("/dev/accel0", "libtpu"), (), True)
    nothing = devices.Evidence("gpu", (), ("no /dev/nvidia*",), False)
    monkeypatch.setattr(devices, "survey", lambda: (evidence, nothing))
    chosen = devices.choose_platform({})
    assert chosen.platform == "cpu"
    assert "TPU found: /dev/accel0, libtpu, but it does not start: " in chosen.reason
    assert "no GPU: no /dev/nvidia*" in chosen.reason


def test_doctor_reports_as_text_and_as_json_with_status_0(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    command = [sys.executable, "-m", "podtune.cli.main", "doctor"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["platform"]["platform"] == "cpu"
    assert report["versions"]["jax"]
    assert report["host"]["cores"] >= 1
    assert report["credentials"]["Hugging Face token"] == "HF_TOKEN is set"
    text = doctor.said(report)
    for heading in ("Devices", "Versions", "Host", "Credentials and caches", "podtune runs on the CPU"):
        assert heading in text
    assert "very_secret" not in done.stdout + text


def test_a_driver_that_hangs_or_crashes_costs_doctor_one_line(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(30)")
    assert "did not start within 0.2 s" in doctor.probe(0.2)["error"]
    monkeypatch.setattr(doctor, "PROBE", "import os; os._exit(9)")
    assert "status 9" in doctor.probe(30)["error"]
    report = {
        "platform": doctor.probe(30),
        "evidence": [],
        "versions": {"a": None},
        "host": doctor.host(),
        "credentials": {"b": "c"},
    }
    assert "status 9" in doctor.said(report)


def test_free_memory_is_told(monkeypatch):
    free = doctor.free_memory_gib()
    assert free is None or 0 <= free < 1 << 20

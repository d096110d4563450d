"""A training process of its own, for tests that kill one. `python train_worker.py '{"output": …, …}'`

Settings: output; steps; checkpoint_every; kill_at, interrupt_at (a step at which it kills or interrupts
itself); batches (a file for the hashes of batches); process, processes, coordinator; fsdp; apart (the devices of
the processes take turns in the mesh, as on a slice).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from train_cases import Rows, at_step, make_job, make_run, recorded_batches

from podtune.config.errors import PodtuneError
from podtune.config.schema import Mesh
from podtune.parallel.distributed import start_processes
from podtune.parallel.mesh import build_mesh
from podtune.train.feed import Feed
from podtune.train.loop import train


def main() -> None:
    settings = json.loads(sys.argv[1])
    if "coordinator" in settings:
        environment = {
            "PODTUNE_COORDINATOR": settings["coordinator"],
            "PODTUNE_PROCESSES": str(settings["processes"]),
            "PODTUNE_PROCESS": str(settings["process"]),
        }
        print(start_processes(environment, start_seconds=60, heartbeat_seconds=10), flush=True)
    jax.config.update("jax_disable_most_optimizations", True)
    fsdp = settings.get("fsdp")
    mesh = build_mesh(Mesh(fsdp=fsdp, data=1), in_order(settings)) if fsdp else build_mesh(Mesh(), jax.devices()[:1])
    train_settings = {
        "schedule": {"name": "constant", "warmup": 0},
        "steps": settings["steps"],
        "checkpoint_every": settings.get("checkpoint_every", "10m"),
    }
    job = make_job(make_run(settings["output"], train=train_settings), rows=Rows(11), mesh=mesh)
    with contextlib.ExitStack() as stack:
        if "batches" in settings:
            stack.enter_context(recorded_batches(Path(settings["batches"])))
        if "kill_at" in settings:
            die_at(settings["kill_at"])
        if "interrupt_at" in settings:
            stack.enter_context(at_step(settings["interrupt_at"], lambda: os.kill(os.getpid(), signal.SIGTERM)))
        train(job)


def in_order(settings: dict[str, Any]) -> list[Any]:
    devices = jax.devices()
    halves = devices[: len(devices) // 2], devices[len(devices) // 2 :]
    return [device for pair in zip(*halves, strict=True) for device in pair] if settings.get("apart") else devices


def die_at(step: int) -> None:
    """SIGKILL when the batch after that step is asked for."""
    next_batch = Feed.next

    def next_or_die(self: Feed, request: int = 0):
        if self._step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return next_batch(self, request)

    Feed.next = next_or_die


def start_worker(*, devices: int = 8, **settings: Any) -> subprocess.Popen[str]:
    """Starts this file with these settings, on so many CPU devices, sharing the tests' cache of compiled programs."""
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(settings)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PODTUNE_COMPILE_CACHE": os.environ["PODTUNE_CACHE"] + "/jax",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    try:
        main()
    except PodtuneError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(error.exit_status)

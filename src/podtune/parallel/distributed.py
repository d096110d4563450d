"""Several processes as one program: each finds the others at the start, or says within a set time why it could not.

Called once, before anything asks jax for devices. Where the processes are is read from the environment that a launcher
sets, or detected by jax on TPU pods, Slurm and Kubernetes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import multihost_utils

from podtune.config.errors import RunFailure, UserError
from podtune.parallel.devices import survey
from podtune.parallel.rendezvous import meet

COORDINATOR, PROCESSES, PROCESS = "PODTUNE_COORDINATOR", "PODTUNE_PROCESSES", "PODTUNE_PROCESS"
# What tells that a scheduler has started several processes; how many, jax finds out.
_SCHEDULERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# A process that has been silent for so long counts as dead, and the others end with that reason.
HEARTBEAT_SECONDS = 30
START_SECONDS = 300


@dataclass(frozen=True)
class Processes:
    """This process and how many there are."""

    index: int
    count: int

    def __str__(self) -> str:
        return "one process" if self.count == 1 else f"process {self.index} of {self.count}"


def start_processes(
    environment: Mapping[str, str] | None = None,
    *,
    start_seconds: int = START_SECONDS,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> Processes:
    """Joins the other processes, if there are any.

    PODTUNE_COORDINATOR=host:port, PODTUNE_PROCESSES and PODTUNE_PROCESS (from 0) name them; without these, jax detects
    TPU pods and schedulers. Raises UserError for a half or wrongly set environment, RunFailure when not all processes
    arrive within start_seconds.
    """
    environment = os.environ if environment is None else environment
    given = _given(environment)
    if given is None and not _is_detectable(environment):
        return Processes(0, 1)
    # Only matters where the processes compute on CPUs.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # At the end nobody is waited for long: the run's own checkpoints are its last barrier.
    limits: dict[str, Any] = {
        "initialization_timeout": start_seconds,
        "heartbeat_timeout_seconds": heartbeat_seconds,
        "shutdown_timeout_seconds": heartbeat_seconds,
    }
    try:
        if given is None:
            jax.distributed.initialize(**limits)
        else:
            coordinator, count, index = given
            host, _, port = coordinator.rpartition(":")
            meet(host, int(port), index=index, count=count, seconds=start_seconds)
            jax.distributed.initialize(coordinator, num_processes=count, process_id=index, **limits)
    except ValueError as error:
        if given is None:  # one TPU host, or a scheduler with a single task
            return Processes(0, 1)
        raise UserError(f"{COORDINATOR}={given[0]}: {error}.") from error
    except RuntimeError as error:
        raise RunFailure(
            f"The processes did not come together within {start_seconds} s: {_first_line(error)} Look at the logs of "
            f"the others, and whether each host can reach the coordinator's address."
        ) from error
    return Processes(jax.process_index(), jax.process_count())


def wait_for_all(what: str) -> None:
    """Returns once every process has come to this place, which `what` names; at once where there is one alone."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def _given(environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """(coordinator, processes, this process) as the environment names them; None when it does not."""
    names = (COORDINATOR, PROCESSES, PROCESS)
    values = {name: environment[name].strip() for name in names if environment.get(name, "").strip()}
    if not values:
        return None
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(f"{', '.join(values)} is set and {', '.join(missing)} is not. Set all three or none.")
    host, _, port = values[COORDINATOR].rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{COORDINATOR}={values[COORDINATOR]} is no host:port, such as 10.0.0.2:8476.")
    numbers = []
    for name in (PROCESSES, PROCESS):
        if not values[name].isdigit():
            raise UserError(f"{name}={values[name]} is no whole number.")
        numbers.append(int(values[name]))
    count, index = numbers
    if index >= count:
        raise UserError(f"{PROCESS}={index} is not below {PROCESSES}={count}; processes count from 0.")
    return values[COORDINATOR], count, index


def _is_detectable(environment: Mapping[str, str]) -> bool:
    if any(environment.get(name, "1").isdigit() and int(environment.get(name, "1")) > 1 for name in _SCHEDULERS):
        return True
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return True
    return any(evidence.platform == "tpu" and evidence.usable for evidence in survey())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") + "."

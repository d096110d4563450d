"""Two real processes of four CPU devices each, over loopback."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from train_cases import Rows, logged, make_job, make_run
from train_worker import start_worker

from podtune.config.errors import RunFailure, UserError
from podtune.config.schema import Mesh
from podtune.parallel.distributed import Processes, start_processes
from podtune.parallel.mesh import build_mesh
from podtune.parallel.rendezvous import meet
from podtune.train.loop import train

pytestmark = pytest.mark.usefixtures("quick_compiling")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_pair(output, **settings):
    coordinator = f"127.0.0.1:{free_port()}"
    shared = {"output": str(output), "devices": 4, "fsdp": 8, "coordinator": coordinator, "processes": 2}
    return [
        start_worker(**shared, process=process, **settings.get(f"of_{process}", {}), **settings["both"])
        for process in (0, 1)
    ]


# Pitfall 19 (and 14: both stop at the same step, or neither does).
def test_two_processes_train_as_one_does_and_when_one_is_killed_the_other_ends_with_a_reason(tmp_path):
    pair = start_pair(tmp_path / "two", both={"steps": 6, "apart": True}, of_1={"kill_at": 4})
    try:
        one = make_job(
            make_run(tmp_path / "one", train={"steps": 6, "schedule": {"name": "constant", "warmup": 0}}),
            rows=Rows(11),
            mesh=build_mesh(Mesh(fsdp=8, data=1)),
        )
        train(one)
        pair[1].communicate(timeout=200)
        assert pair[1].returncode == -9
        died = time.monotonic()
        _, said = pair[0].communicate(timeout=60)
        waited = time.monotonic() - died
    finally:
        for process in pair:
            process.kill()
    assert pair[0].returncode not in (0, None), said
    assert waited < 45  # the heartbeat's 10 s, on a machine with too much to do
    assert "another process" in said or "heartbeat" in said, said
    two = logged(tmp_path / "two")
    wanted = logged(tmp_path / "one")
    assert len(two) >= 3
    np.testing.assert_allclose(list(two.values()), [wanted[step] for step in two], rtol=1e-5)


@pytest.mark.slow
def test_two_processes_finish_checkpoint_and_go_on_after_a_kill(tmp_path):
    killed = start_pair(tmp_path, both={"steps": 8, "checkpoint_every": "0.001s"}, of_1={"kill_at": 6})
    for process in killed:
        process.communicate(timeout=300)
    done = max(logged(tmp_path))
    pair = start_pair(tmp_path, both={"steps": 8, "checkpoint_every": "0.001s"})
    said = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], said
    assert list(logged(tmp_path)) == list(range(1, 9))
    assert done < 8


def test_processes_that_do_not_arrive_are_named_within_the_set_time():
    port = free_port()
    environment = {"PODTUNE_COORDINATOR": f"127.0.0.1:{port}", "PODTUNE_PROCESSES": "3", "PODTUNE_PROCESS": "1"}
    with pytest.raises(RunFailure, match=f"process 1 did not meet process 0 at 127.0.0.1:{port} within 1 s"):
        start_processes(environment, start_seconds=1)
    with ThreadPoolExecutor() as pool:
        second = pool.submit(meet, "127.0.0.1", port, index=2, count=3, seconds=5)
        with pytest.raises(RunFailure, match=r"2 of 3 processes met at .* within 2 s; missing: 1\."):
            start_processes({**environment, "PODTUNE_PROCESS": "0"}, start_seconds=2)
        second.exception()


def test_all_processes_leave_the_meeting_together():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(meet, "127.0.0.1", port, index=i, count=3, seconds=20) for i in (1, 2, 0)]:
            future.result()


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunFailure, match=f"process 0 cannot listen on port {port}"):
            meet("127.0.0.1", port, index=0, count=2, seconds=1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PODTUNE_COORDINATOR": "host:1"}, "PODTUNE_PROCESSES, PODTUNE_PROCESS is not"),
        ({"PODTUNE_COORDINATOR": "host", "PODTUNE_PROCESSES": "2", "PODTUNE_PROCESS": "0"}, "no host:port"),
        ({"PODTUNE_COORDINATOR": "h:1", "PODTUNE_PROCESSES": "two", "PODTUNE_PROCESS": "0"}, "two is no whole number"),
        ({"PODTUNE_COORDINATOR": "h:1", "PODTUNE_PROCESSES": "2", "PODTUNE_PROCESS": "2"}, "not below"),
    ],
)
def test_a_half_or_wrongly_set_environment_is_refused_by_name(environment, message):
    with pytest.raises(UserError, match=message):
        start_processes(environment)


def test_without_an_environment_there_is_one_process():
    assert start_processes({}) == Processes(0, 1)
    assert jax.process_count() == 1

"""What every test stands on: 8 CPU devices, no network for the hub, shape checks, and genuine inputs."""

import os
import sys
from pathlib import Path
from typing import Any

# Before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from jaxtyping import install_import_hook

install_import_hook("podtune", "shape_checks.check")

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
REAL_INPUTS: dict[str, list[str]] = {"had": [], "missed": []}

hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI") == "true":
    hypothesis.settings.load_profile("ci")


def real_input(name: str) -> Path:
    """The genuine file of that name (see tools/real_inputs.py). Skips the test, saying why, when it cannot be had."""
    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.insert(0, tools)
    try:
        import real_inputs

        path = Path(real_inputs.fetch(name))
    except Exception as error:
        REAL_INPUTS["missed"].append(f"{name}: {error}")
        pytest.skip(f"genuine input {name!r} cannot be had: {error}")
    REAL_INPUTS["had"].append(name)
    return path


@pytest.fixture(name="real_input", scope="session")
def real_input_fixture():
    """`real_input` as a fixture."""
    return real_input


@pytest.fixture(autouse=True)
def _own_temporary_folders(tmp_path_factory, monkeypatch):
    """Caches of podtune and of the hub lie in a folder of the test session, and no token of the user's is seen."""
    folder = tmp_path_factory.getbasetemp() / "home"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PODTUNE_CACHE", str(folder / "podtune"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture(scope="module")
def quick_compiling():
    """For files that compile many small programs: what they compare is compiled alike, in half the time."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def one_device():
    """`one_device_shown`, for a whole test."""
    from workflow_cases import one_device_shown

    with one_device_shown():
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Gathers what the workers of a parallel run had and missed."""
    for kind, names in getattr(node, "workeroutput", {}).get("real_inputs", {}).items():
        REAL_INPUTS[kind] += names


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, at least one genuine input must have been had where any was asked for."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["real_inputs"] = REAL_INPUTS
    elif os.environ.get("CI") == "true" and REAL_INPUTS["missed"] and not REAL_INPUTS["had"]:
        print("\nNo genuine input could be had, and CI must have at least one:", *REAL_INPUTS["missed"], sep="\n  ")
        session.exitstatus = 1

"""`podtune doctor`: what this machine has, and what is missing. Reads no secret aloud and asks no network."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

PACKAGES = (
    "podtune", "jax", "jaxlib", "libtpu", "optax", "orbax-checkpoint", "grain", "numpy", "safetensors", "tokenizers",
    "transformers", "huggingface_hub", "pydantic", "fsspec", "gcsfs", "s3fs",
)  # fmt: skip

PROBE = """
import json
from podtune.parallel.devices import choose_platform
chosen = choose_platform()
import jax
def memory(device):
    try:
        stats = device.memory_stats() or {}
    except Exception:
        stats = {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
    return None if limit is None else {"total_gib": limit / 2**30, "free_gib": (limit - used) / 2**30}
devices = [{"id": d.id, "kind": d.device_kind, "memory": memory(d)} for d in jax.local_devices()]
print("PROBE " + json.dumps({"platform": chosen.platform, "reason": chosen.reason, "devices": devices}))
"""
"""Run in a process of its own: a driver that hangs or crashes costs a line of the report, and nothing else."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the devices to start.")] = 60.0,
) -> None:
    """Say which devices are found and chosen, and what is missing; versions, memory, credentials and caches."""
    report = examine(timeout_s)
    typer.echo(json.dumps(report, indent=2) if as_json else said(report))


def examine(timeout_s: float) -> dict[str, Any]:
    """The whole report."""
    from podtune.parallel.devices import survey

    return {
        "platform": probe(timeout_s),
        "evidence": [
            {
                "platform": one.platform,
                "usable": one.usable,
                "found": one.found,
                "missing": one.missing,
                "said": str(one),
            }
            for one in survey()
        ],
        "versions": versions(),
        "host": host(),
        "credentials": credentials(),
    }


def probe(timeout_s: float) -> dict[str, Any]:
    """The platform that podtune would use, its devices and their memory, or why that cannot be told."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the devices did not start within {timeout_s:g} s; another process may hold them"}
    answer = next((line for line in done.stdout.splitlines() if line.startswith("PROBE ")), None)
    if answer is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": f"starting jax failed (status {done.returncode}): {lines[-1] if lines else 'it said nothing'}"}
    return json.loads(answer.removeprefix("PROBE "))


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def host() -> dict[str, Any]:
    """Cores, memory and disk of this host, as far as this process may use them."""
    from podtune.parallel.devices import core_count

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": core_count(),
        "free_memory_gib": free_memory_gib(),
        "free_disk_gib": shutil.disk_usage(Path.cwd()).free / 2**30,
    }


def free_memory_gib() -> float | None:
    """Memory that can still be had, the limit of a container taken into account; None where it cannot be told."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        pass
    return max(free, 0) / 2**30


def credentials() -> dict[str, str]:
    """Which credentials and caches are found. Says where, never what."""
    home = Path.home()
    hub = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface")
    token_file = Path(os.environ.get("HF_TOKEN_PATH") or hub / "token")
    google = home / ".config/gcloud/application_default_credentials.json"
    if "GOOGLE_APPLICATION_CREDENTIALS" in os.environ:
        google = Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"])
    amazon = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials")
    token = "HF_TOKEN is set" if os.environ.get("HF_TOKEN") else found_at(token_file)
    keys = "AWS_ACCESS_KEY_ID is set" if os.environ.get("AWS_ACCESS_KEY_ID") else found_at(amazon)
    offline = " (HF_HUB_OFFLINE is set: nothing is downloaded)" if os.environ.get("HF_HUB_OFFLINE", "0") != "0" else ""
    return {
        "Hugging Face token": token,
        "Hugging Face cache": found_at(Path(os.environ.get("HF_HUB_CACHE") or hub / "hub")) + offline,
        "podtune cache": found_at(Path(os.environ.get("PODTUNE_CACHE", "~/.cache/podtune")).expanduser()),
        "Google Cloud credentials": found_at(google),
        "AWS credentials": keys,
    }


def found_at(path: Path) -> str:
    """`found at ...` or `none at ...`."""
    try:
        there = path.exists()
    except OSError:
        there = False
    return f"{'found' if there else 'none'} at {path}"


def said(report: dict[str, Any]) -> str:
    """The report as text."""
    chosen = report["platform"]
    lines = ["Devices"]
    if "error" in chosen:
        lines.append(f"  {chosen['error']}")
    else:
        lines.append(f"  podtune runs on the {chosen['platform'].upper()}: {chosen['reason']}")
        for device in chosen["devices"]:
            memory = device["memory"]
            free = f", {memory['free_gib']:.1f} of {memory['total_gib']:.1f} GiB free" if memory else ""
            lines.append(f"  device {device['id']}: {device['kind']}{free}")
    lines += [f"  {one['said']}" for one in report["evidence"] if "error" in chosen or one["found"]]
    lines += [
        "",
        "Versions",
        *table({name: version or "not installed" for name, version in report["versions"].items()}),
    ]
    machine = report["host"]
    memory = machine["free_memory_gib"]
    host_lines = {
        "system": machine["system"],
        "cores": str(machine["cores"]),
        "free memory": "unknown" if memory is None else f"{memory:.1f} GiB",
        "free disk": f"{machine['free_disk_gib']:.1f} GiB in {Path.cwd()}",
    }
    lines += ["", "Host", *table(host_lines), "", "Credentials and caches", *table(report["credentials"])]
    return "\n".join(lines)


def table(rows: dict[str, str]) -> list[str]:
    """Names and values in two columns."""
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {value}" for name, value in rows.items()]

"""An output folder in an object store: its files are written on this machine and copied there, run.json last.

Checkpoints are not copied: training writes them to the store itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from podtune.config.errors import RunFailure, UserError
from podtune.hub.addresses import file_system
from podtune.hub.remote import upload_folder

SMALL_FILES = ("run.yaml", "metrics.jsonl", "samples.jsonl", "report.html", "README.md", "run.json")
_FOLDERS = ("model", "adapter", "tensorboard")


def listed(address: str) -> set[str]:
    """The names directly below an address; empty where nothing is. Raises UserError when it cannot be reached."""
    system, root = _open(address)
    try:
        found = system.ls(root, detail=False)
    except FileNotFoundError:
        return set()
    except Exception as error:  # each store has its own
        raise UserError(
            f"output: {address} cannot be listed ({_said(error)}). Check the bucket's name and the credentials."
        ) from error
    return {str(name).rstrip("/").rsplit("/", 1)[-1] for name in found} - {root.rstrip("/").rsplit("/", 1)[-1]}


def fetch(address: str, folder: Path) -> None:
    """Makes the small files of the folder those of the address, so that its run can be gone on with on any machine.
    What an earlier run has left in the folder, and the address does not hold, is removed."""
    system, root = _open(address)
    there = listed(address)
    for name in SMALL_FILES:
        if name not in there:
            (folder / name).unlink(missing_ok=True)
        else:
            try:
                system.get_file(f"{root}/{name}", str(folder / name))
            except Exception as error:
                raise RunFailure(f"{address}/{name} cannot be read ({_said(error)}).") from error


def forget(address: str, names: Iterable[str]) -> None:
    """Removes these files and folders from below the address, those that are there."""
    system, root = _open(address)
    there = listed(address)
    for name in names:
        if name in there:
            try:
                system.rm(f"{root}/{name}", recursive=True)
            except Exception as error:
                raise RunFailure(
                    f"{address}/{name} cannot be removed ({_said(error)}). Name another output."
                ) from error


def publish(folder: Path, address: str, *, whole: bool) -> None:
    """Copies the small files, and when `whole` the exported folders before them; run.json, which counts, comes last."""
    system, root = _open(address)
    for name in (*(_FOLDERS if whole else ()), *SMALL_FILES):
        path = folder / name
        try:
            if path.is_dir():
                upload_folder(path, f"{address.rstrip('/')}/{name}")
            elif path.is_file():
                system.put_file(str(path), f"{root}/{name}")
        except Exception as error:
            raise RunFailure(
                f"{address}/{name} cannot be written ({_said(error)}). The files are in {folder}; run again to go on."
            ) from error


def _open(address: str) -> tuple[Any, str]:
    try:
        system, root = file_system(address)
    except UserError as error:
        raise UserError(f"output: {error}") from error
    return system, root.rstrip("/")


def _said(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

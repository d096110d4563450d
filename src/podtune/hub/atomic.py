"""Files and folders that appear whole or not at all, even when the process is killed. Used across hub and export."""

import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_EXCHANGE = 2
_CURRENT_FOLDER = -100


@contextlib.contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the name `path` when the block ends without an error.

    durable: on the disk by then. False is for files that bear a checksum and can be made again after a crash.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def new_scratch_folder(target: Path) -> Path:
    """An empty hidden folder beside `target`, on the same file system. Those of killed processes are cleared away."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.writing-"
    for stale in target.parent.glob(f"{prefix}*"):
        if not _is_running(stale.name.removeprefix(prefix).split("-")[0]):
            shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
    scratch.chmod(0o777 & ~_umask())
    return scratch


def replace_folder(target: Path, scratch: Path) -> None:
    """Puts `scratch` in the place of `target`, in one step where the system can exchange two names."""
    target = target.absolute()
    try:
        # An empty or absent target is simply renamed over.
        os.rename(scratch, target)
    except OSError:
        if not _exchange(scratch, target):
            # Without the exchange there is a moment in which the old folder lies beside its place, whole.
            aside = scratch.with_name(scratch.name + "-old")
            os.rename(target, aside)
            os.rename(scratch, target)
            scratch = aside
        shutil.rmtree(scratch, ignore_errors=True)
    _sync_folder(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names (Linux's renameat2). False where that cannot be done."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return rename(_CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), _EXCHANGE) == 0


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_running(process: str) -> bool:
    if not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

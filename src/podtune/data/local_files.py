"""Files of this machine by folder and by pattern, for sources. A folder that is met again, as through a link to one
above it, is looked into once."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

_PATTERN = re.compile(r"[*?\[]")


def is_pattern(path: str) -> bool:
    """Whether a path has letters that stand for others: * ? [."""
    return bool(_PATTERN.search(path))


def files_below(folder: Path) -> list[Path]:
    """The files of a folder and of the folders in it, sorted; links are followed."""
    return sorted(_walk(folder))


def files_matching(pattern: str) -> list[str]:
    """The files whose names a pattern matches, sorted. `**` stands for any folders, or none; a name that begins with a
    dot is matched only by what begins with one."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return sorted(name for name in glob.glob(pattern) if os.path.isfile(name))
    start = next(at for at, part in enumerate(parts) if is_pattern(part))
    root = Path(*parts[:start])
    return sorted(str(file) for file in _walk(root) if _matches(file.relative_to(root).parts, parts[start:]))


def _walk(root: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for folder, inside, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inside.clear()
            continue
        seen.add(real)
        inside.sort()
        yield from (file for name in files if (file := Path(folder, name)).is_file())


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        passed = next((at for at, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_matches(parts[at:], wanted[1:]) for at in range(passed + 1))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])

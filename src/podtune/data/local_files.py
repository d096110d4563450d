"""Files of this machine by folder and by pattern, for sources. Links are followed, but not round in circles, and a file
that is met in one folder by several ways is one file."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from podtune.config.errors import UserError

HIDDEN = (".", "_")  # Spark and Hive write their own files under such names, and do not read them as data
_PATTERN = re.compile(r"[*?\[]")


def is_pattern(path: str) -> bool:
    """Whether a path has letters that stand for others: * ? [."""
    return bool(_PATTERN.search(path))


def files_below(folder: Path) -> list[Path]:
    """The files of a folder and of the folders in it, sorted, but for those whose names, or whose folders' names, begin
    with a dot or an underscore. Raises UserError for a folder that cannot be read."""
    return _once(sorted(path for path in _walk(folder, hidden=HIDDEN) if path.is_file()))


def passed_over(folder: Path) -> tuple[list[str], list[str]]:
    """What files_below leaves out, by names below the folder: what begins with a dot or an underscore, and links that
    lead nowhere, pipes and the like."""
    hidden: list[str] = []
    others = [path for path in _walk(folder, hidden=HIDDEN, passed=hidden) if not path.is_file()]
    return sorted(hidden), sorted(str(path.relative_to(folder)) for path in others)


def files_matching(pattern: str) -> list[str]:
    """The files whose names a pattern matches, sorted. `**` stands for any folders, or none; a name that begins with a
    dot is matched only by what begins with one. Raises UserError for a folder that cannot be read."""
    return sorted(map(str, _once(sorted(path for path in _matching(pattern) if path.is_file()))))


def matched_otherwise(pattern: str) -> list[str]:
    """What a pattern matches that is neither file nor folder: links that lead nowhere, pipes and the like."""
    return sorted(str(path) for path in _matching(pattern) if not path.is_file() and not path.is_dir())


def _matching(pattern: str) -> list[Path]:
    parts = Path(pattern).parts
    if "**" not in parts:
        return [Path(name) for name in glob.glob(pattern)]
    start = next(at for at, part in enumerate(parts) if is_pattern(part))
    root, wanted = Path(*parts[:start]), parts[start:]
    hidden = () if any(part.startswith(".") for part in wanted) else (".",)
    return [path for path in _walk(root, hidden=hidden) if _matches(path.relative_to(root).parts, wanted)]


def _walk(root: Path, *, hidden: tuple[str, ...], passed: list[str] | None = None) -> Iterator[Path]:
    """What is below a folder and is no folder. hidden: what the names begin with that are passed over; those are added
    to `passed`."""
    above: dict[str, tuple[str, ...]] = {str(root): ()}
    for folder, inside, files in os.walk(root, followlinks=True, onerror=_refuse):
        ancestors = above.pop(folder)
        real = os.path.realpath(folder)
        if real in ancestors:
            inside.clear()
            continue
        if passed is not None:
            passed += [
                str(Path(folder, name).relative_to(root)) for name in (*inside, *files) if name.startswith(hidden)
            ]
        inside[:] = [name for name in inside if not name.startswith(hidden)]
        above |= {os.path.join(folder, name): (*ancestors, real) for name in inside}
        yield from (Path(folder, name) for name in files if not name.startswith(hidden))


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise UserError(f"{error.filename}: this folder cannot be read ({error.strerror}). Name files without it.")


def _once(files: Sequence[Path]) -> list[Path]:
    """Without the same file in the same folder by another way, as a link to a folder makes of every file in it."""
    seen: dict[tuple[str, str], Path] = {}
    for file in files:
        seen.setdefault((os.path.realpath(file.parent), file.name), file)
    return list(seen.values())


def _matches(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == "**":
        passed = next((at for at, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_matches(parts[at:], wanted[1:]) for at in range(passed + 1))
    if not parts or (parts[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], wanted[0]) and _matches(parts[1:], wanted[1:])

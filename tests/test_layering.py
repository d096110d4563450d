"""The shape of the source tree: imports go down only, files are small and have one subject, tables are explicit."""

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "podtune"
LAYERS = (
    "config", "parallel", "weights", "hub", "data", "layers", "experts", "models", "families", "objectives", "train",
    "plan", "export", "serve", "workflow", "tune", "launch", "cli",
)  # fmt: skip
"""From the bottom to the top: a layer imports from those before it and from itself."""

WITHOUT_JAX = ("cli", "config", "data", "hub")
FORBIDDEN_NAMES = ("utils", "util", "helpers", "helper", "common", "misc")
MAX_LINES = 400
FILES = sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str | None:
    """The layer a file belongs to; None for the package's own __init__."""
    inside = path.relative_to(SOURCE).parts
    return inside[0] if len(inside) > 1 else None


def imports(tree: ast.Module, *, everywhere: bool) -> Iterator[tuple[str, int]]:
    """The modules a file imports, with lines: all of them, or those imported when the file is (outside functions)."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if everywhere or not (inner or type_checking):
            waiting.extend(ast.iter_child_nodes(node))


def offences(path: Path) -> list[str]:
    """What a file imports that it may not."""
    layer = layer_of(path)
    if layer is None:
        return []
    if layer not in LAYERS:
        return [f"{path}: {layer} is no layer"]
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[str] = []
    for module, line in imports(tree, everywhere=True):
        parts = module.split(".")
        if parts[0] == "podtune" and len(parts) > 1 and parts[1] in LAYERS and parts[1] not in allowed:
            found.append(f"{path.relative_to(ROOT)}:{line}: {layer} imports {module}, which lies above it")
    for module, line in imports(tree, everywhere=False):
        if layer in WITHOUT_JAX and module.split(".")[0] in (
            "jax",
            "jaxlib",
            "optax",
            "orbax",
            "transformers",
            "torch",
        ):
            found.append(f"{path.relative_to(ROOT)}:{line}: {layer} imports {module} as soon as it is imported itself")
    return found


def test_imports_go_down_only_and_the_lower_layers_import_no_jax():
    assert [offence for path in FILES for offence in offences(path)] == []


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("config/x.py", "from podtune.data.rows import Row\n"),
        ("layers/x.py", "def f():\n    import podtune.models.decoder\n"),
        ("data/x.py", "import jax\n"),
        ("hub/x.py", "import numpy\nfrom jax import numpy\n"),
        ("utilities/x.py", ""),
    ],
)
def test_this_test_sees_an_offence(tmp_path, monkeypatch, place, text):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    path = tmp_path / place
    path.parent.mkdir()
    path.write_text(text)
    assert offences(path)


def test_files_are_short_and_none_is_a_drawer_of_odds_and_ends():
    long = {str(path.relative_to(ROOT)): n for path in FILES if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert long == {}
    assert [path for path in FILES if path.stem in FORBIDDEN_NAMES or path.parent.name in FORBIDDEN_NAMES] == []


def test_every_module_says_what_it_holds():
    silent = [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


TABLES = {
    "podtune.cli.main:COMMANDS": 8,
    "podtune.data.sources:FORMATS": 5,
    "podtune.families:FAMILIES": 7,
    "podtune.objectives:OBJECTIVES": 1,
    "podtune.train.optimizers:OPTIMIZERS": 5,
    "podtune.train.schedules:SCHEDULES": 4,
    "podtune.config.rules:RULES": 10,
}
"""The tables of the package and how many rows they have at least."""


@pytest.mark.parametrize("place", TABLES)
def test_a_table_is_written_out_in_one_place(place):
    """One literal, whose names are all imported or defined in that file: nothing is registered on import."""
    module, _, name = place.partition(":")
    table = getattr(importlib.import_module(module), name)
    assert len(table) >= TABLES[place]
    rows = table.values() if isinstance(table, Mapping) else table
    assert all(row is not None for row in rows)
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    assigned = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and name in ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    ]
    assert len(assigned) == 1
    assert isinstance(assigned[0].value, ast.Dict | ast.Tuple)
    changed = [
        str(path.relative_to(ROOT))
        for path in FILES
        if f"{name}[" in (text := path.read_text())
        and any(
            isinstance(node, ast.Assign | ast.AugAssign | ast.Delete) and f"{name}[" in ast.unparse(node).split("=")[0]
            for node in ast.walk(ast.parse(text))
        )
    ]
    assert changed == []


def test_the_table_of_what_to_touch_is_true():
    """Every path and table that CONTRIBUTING names exists."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and "`" in line]
    assert len(rows) >= 8
    for row in rows:
        for quoted in row.split("|")[2].split("`")[1::2]:
            if quoted.isupper():
                assert any(place.endswith(f":{quoted}") for place in TABLES), row
            else:
                assert (SOURCE / quoted).exists() or (ROOT / quoted).exists(), row


def test_contributing_is_one_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60

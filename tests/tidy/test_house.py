"""The house is tidy: short lines, functions and files, banned imports, true links, no leftovers."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src").rglob("*.py"))
PYTHON = [path for folder in ("src", "tests", "bench", "examples", "tools")
          for path in sorted((ROOT / folder).rglob("*.py"))]  # fmt: skip
PAGES = [path for path in sorted(ROOT.rglob("*.md")) if ".venv" not in path.parts]
FUNCTION_LINES_MAX = 50
FILE_LINES_MAX = 500
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec", "yaml.load", "os.system"}
ENTRANCES = {"__init__", "__main__", "main", "llama_server", "launch"}
BANNED_NAMES = {"utils", "common", "helpers", "services", "managers", "base", "misc"}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCE, ids=name)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    if "versions" in path.parts:
        return  # A migration is one list of statements, written once.
    assert text.count("\n") <= FILE_LINES_MAX
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCE, ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "a module docstring is missing"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_nothing_dangerous_is_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not BANNED_MODULES & set(imported(node))
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in BANNED_CALLS
            for keyword in node.keywords:
                shell = keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
                assert not shell, f"line {node.lineno}: shell=True"


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield (node.module or "").split(".")[0]
    else:
        yield from (alias.name.split(".")[0] for alias in node.names)


@pytest.mark.parametrize("path", SOURCE, ids=name)
def test_names_say_what_a_room_is_for(path: Path) -> None:
    assert not BANNED_NAMES & {part.removesuffix(".py") for part in path.parts}


def test_no_module_is_dead() -> None:
    """Every module is imported by another, or is run by name."""
    wanted: set[str] = set()
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    for path in SOURCE:
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        run_by_name = path.stem in ENTRANCES or {"roots", "migrations"} & set(path.parts)
        assert run_by_name or module in wanted, f"{module} is imported nowhere"


def test_one_table_has_one_writer() -> None:
    """SQL that writes a table stands in that table's module alone."""
    writers: dict[str, set[str]] = {}
    for path in SOURCE:
        if "migrations" in path.parts:
            continue
        for table in re.findall(
            r"(?:INSERT INTO|INSERT OR \w+ INTO|UPDATE|DELETE FROM)\s+([a-z_]+)", path.read_text()
        ):
            writers.setdefault(table, set()).add(name(path))
    for table, paths in writers.items():
        assert len(paths) == 1, f"{table} is written by {sorted(paths)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_in_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{target} is not there"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_in_pages_exist(page: Path) -> None:
    """`src/…`, `tests/…`, `bench/…` in backticks are real."""
    for target in re.findall(
        r"`((?:src|tests|bench|examples|docs|tools)/[\w./-]*)`", page.read_text()
    ):
        assert (ROOT / target).exists(), f"{target} is not there"


def test_locks_are_hashed_and_name_no_registry() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        text = lock.read_text()
        assert "://" not in text
        assert "index" not in text.lower().replace("importlib", "")
        pinned = re.findall(r"^[A-Za-z][\w.-]*==", text, re.M)
        assert pinned
        assert text.count("--hash=sha256:") >= len(pinned)


def test_no_registry_host_stands_in_any_file() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    hosts = [".".join(words) for words in (
        ("pypi", "org"), ("pythonhosted", "org"), ("registry", "npmjs", "org"),
        ("deb", "debian", "org"), ("huggingface", "co"),
    )]  # fmt: skip
    for listed_name in listed.split("\0"):
        path = ROOT / listed_name
        if listed_name and path.is_file() and path.suffix not in (".gguf", ".png"):
            text = path.read_text(errors="replace")
            for host in hosts:
                assert host not in text, f"{listed_name} names {host}"


def test_open_questions_have_an_issue() -> None:
    for path in SOURCE:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            marked = re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line)
            assert not marked or re.search(r"#\d+", line), f"{name(path)}:{number}: {line.strip()}"

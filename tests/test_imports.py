"""The import rule: who may know megatron, SGLang and torch.distributed. Read from the source.

The rule is about each file's own import statements, anywhere in it, those for types included.
Not covered: what a file loads through others, but for the recipe, which must load without torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "megarl").rglob("*.py"))

PURE = ("contracts/", "recipe", "algorithms/", "rewards/", "reshard/layout", "reshard/plan")
PURE += ("reshard/placement", "reshard/shares", "reshard/buckets")
PURE += ("reshard/families/",)
SGLANG = ("rollout/", "platforms/")
MEGATRON = ("models/", "checkpoint/", "platforms/")


def _name(path: Path) -> str:
    return path.relative_to(ROOT / "megarl").as_posix()


def _imports(source: str) -> set[str]:
    """Every module named by an import statement, `from a import b` also as `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError("relative imports hide where a name comes from")
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return {name for name in found if isinstance(name, str)}


def _knows(path: Path, package: str) -> bool:
    names = _imports(path.read_text(encoding="utf-8"))
    return any(name == package or name.startswith(package + ".") for name in names)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_file_imports_only_what_its_room_may_know(path: Path) -> None:
    name = _name(path)
    if name.startswith(PURE):
        for package in ("megatron", "sglang", "torch.distributed", "megarl.world"):
            assert not _knows(path, package), f"{name} imports {package}"
    if not name.startswith(SGLANG):
        assert not _knows(path, "sglang"), f"{name} imports sglang"
    if not name.startswith(MEGATRON):
        assert not _knows(path, "megatron"), f"{name} imports megatron"


def test_only_the_generator_and_its_helpers_import_sglang() -> None:
    knowing = {_name(path) for path in FILES if _knows(path, "sglang")}
    rooms = {name for name in knowing if not name.startswith("platforms/")}
    assert rooms <= {"rollout/generator.py", "rollout/scheduler.py"}, rooms


def test_the_reader_sees_every_form_of_import() -> None:
    source = (
        "import sglang.srt as s\nfrom torch import distributed\n"
        "def f():\n    from megatron.core import tensor_parallel\n    import_module('sglang')\n"
    )
    assert {"sglang.srt", "torch.distributed", "megatron.core", "sglang"} <= _imports(source)


def test_the_recipe_loads_without_torch() -> None:
    code = (
        "import sys; import megarl.recipe; "
        "heavy = {'torch', 'megatron', 'sglang', 'numpy', 'transformers'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(heavy)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"importing megarl.recipe loads {done.stderr}"

"""Reads the project's source as syntax trees and names what must not be in it; imports and runs none of it.

``assert`` vanishes under ``python -O``; pickle, and what uses it unseen, would break I10. Words in comments and docstrings
are free. ``--lengths`` lists modules that have grown long; that is a report, not a failure.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

EXECUTABLE_FORMATS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PICKLING_CALLS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip
LONG_MODULE = 300
LONG_FUNCTION = 60


def problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each forbidden thing in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert():
                yield node.lineno, "assert: raise one of ftckpt.errors, which -O does not remove"
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] in EXECUTABLE_FORMATS:
                        yield node.lineno, f"import of {alias.name}: nothing executable is stored or read"
            case ast.ImportFrom(module=module, names=names, level=0):
                if module and module.split(".")[0] in EXECUTABLE_FORMATS:
                    yield node.lineno, f"import from {module}: nothing executable is stored or read"
            case ast.Call(func=func, keywords=keywords):
                yield from _call(node.lineno, func, {k.arg: k.value for k in keywords})


def _call(line: int, func: ast.expr, keywords: dict[str | None, ast.expr]) -> Iterator[tuple[int, str]]:
    name = ast.unparse(func)
    last = name.rsplit(".", 1)[-1]
    if last in PICKLING_CALLS:
        yield line, f"{name}: pickles what it sends"
    if name in {"eval", "exec", "__import__"}:
        yield line, f"{name}: nothing that was read may run"
    if last == "load" and name.split(".")[0] == "torch":
        if not _is(keywords.get("weights_only"), True):
            yield line, f"{name} without weights_only=True: would unpickle anything"
    for forbidden, value in (("weights_only", False), ("allow_pickle", True)):
        if _is(keywords.get(forbidden), value):
            yield line, f"{name}({forbidden}={value}): would unpickle anything"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def lengths(path: Path, tree: ast.Module) -> Iterator[str]:
    """A line for the module if it is long, and one for each long function in it."""
    count = len(path.read_text().splitlines())
    if count > LONG_MODULE:
        yield f"{path}: {count} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            span = (node.end_lineno or node.lineno) - node.lineno + 1
            if span > LONG_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {span} lines"


def main(args: list[str]) -> int:
    """Check, or with ``--lengths`` report; returns the exit status."""
    report = "--lengths" in args
    found: list[str] = []
    for root in (a for a in args if not a.startswith("--")):
        for path in sorted(Path(root).rglob("*.py")):
            tree = ast.parse(path.read_text(), str(path))
            found += lengths(path, tree) if report else (f"{path}:{line}: {text}" for line, text in problems(tree))
    if report and found:
        print(f"  long (modules over {LONG_MODULE} lines, functions over {LONG_FUNCTION}):")
    for line in found:
        print(f"        {line}" if report else line)
    return 1 if found and not report else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

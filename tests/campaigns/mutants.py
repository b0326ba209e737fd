"""Mutation testing: small faults are put into a module, one at a time, and its tests must notice.

    python -m tests.campaigns.mutants                 every module; writes results/mutants.json
    python -m tests.campaigns.mutants munba forum     these modules only
    python -m tests.campaigns.mutants --survivors     only the mutants that survived the last run

Why this is no library. mutmut 3 makes no mutants of decorated functions (property, cached_property,
contextmanager) and of values at the level of a class or a module (the options of every method), and
it makes many of strings, which are messages here. cosmic-ray starts a process for each mutant: 5 s
to import torch and collect the tests, times some thousand mutants. Here a process with torch and
the collected tests forks for each mutant. The child gives the functions in question the mutant's
code, and classes and module the mutant's values (options, constants, default arguments), runs the
tests that reach the mutated line, fastest first, and ends at the first failure. What another module
or a test took from the module while it was collected keeps its value: some mutants of constants
survive by that, none is killed by it.

No mutants are made of: docstrings, strings and messages, annotations, decorators, the arguments of
`raise`, `assert` (types only), `__repr__`, protocols and abstract methods, and the arguments
strict, dtype and device. A mutant is shown to the fastest tests that reach it, up to BUDGET
seconds. A mutant that exceeds its time limit counts as killed and is counted apart. All these
seconds are of the processor, so that other work on the machine changes no verdict; a mutant that
waits ends by the clock, after PATIENCE times as long.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "mutants.json"
# seconds of tests a mutant: the fastest that reach it, as many as fit, and one at least; --budget
BUDGET = 3.0
# times its limit in seconds of the processor: how long a mutant may take by the clock
PATIENCE = 10
MOST = 1000  # mutants a module; beyond, this many are drawn with SEED
SEED = 0
MEMORY = 16 * 2**30  # bytes of address space of a child
PRELOADED = """torch hypothesis pytest yaml scipy.stats scipy.optimize scipy.linalg scipy.sparse.linalg safetensors.torch
    torchjd.aggregation cvxpy curvlinops sklearn.datasets sklearn.linear_model cleanfid.fid
    statsmodels.stats.contingency_tables"""  # what would be imported in every child  # noqa: E501

# Files *_checked.py and the like take too long to be asked.
METHODS = "tests/methods/test_"
LAWS, OPTIONS = METHODS + "laws.py", METHODS + "options.py"
STORAGE = "tests/storage/test_"
SHARED = [METHODS + "base.py", OPTIONS, LAWS, METHODS + "baselines.py", METHODS + "uce.py"]
TESTS: dict[str, list[str]] = {
    "concept_eraser/methods/adversarial.py": [LAWS, OPTIONS, METHODS + "adversarial.py"],
    "concept_eraser/methods/amnesiac.py": [LAWS, OPTIONS, METHODS + "amnesiac.py"],
    "concept_eraser/methods/base.py": SHARED,
    "concept_eraser/methods/bome.py": [LAWS, OPTIONS, METHODS + "bome.py"],
    "concept_eraser/methods/certified_removal.py": [
        LAWS,
        OPTIONS,
        METHODS + "certified_removal.py",
    ],
    "concept_eraser/methods/checks.py": [METHODS + "checks.py", LAWS],
    "concept_eraser/methods/deltagrad.py": [LAWS, OPTIONS, METHODS + "deltagrad.py"],
    "concept_eraser/methods/erasediff.py": [LAWS, OPTIONS, METHODS + "erasediff.py"],
    "concept_eraser/methods/fisher.py": [
        LAWS,
        OPTIONS,
        METHODS + "fisher.py",
        METHODS + "natural_gradient.py",
    ],
    "concept_eraser/methods/forum.py": [LAWS, OPTIONS, METHODS + "forum.py"],
    "concept_eraser/methods/gaussian_mechanism.py": [METHODS + "gaussian_mechanism.py"],
    "concept_eraser/methods/history.py": [METHODS + "history.py", METHODS + "mini_unlearning.py"],
    "concept_eraser/methods/influence.py": [LAWS, OPTIONS, METHODS + "influence.py"],
    "concept_eraser/methods/meta_unlearning.py": [LAWS, OPTIONS, METHODS + "relearning.py"],
    "concept_eraser/methods/mini_unlearning.py": [LAWS, OPTIONS, METHODS + "mini_unlearning.py"],
    "concept_eraser/methods/minmax_ngd.py": [LAWS, OPTIONS, METHODS + "minmax_ngd.py"],
    "concept_eraser/methods/moco.py": [LAWS, OPTIONS, METHODS + "moco.py"],
    "concept_eraser/methods/moml.py": [LAWS, OPTIONS, METHODS + "moml.py"],
    "concept_eraser/methods/munba.py": [LAWS, OPTIONS, METHODS + "munba.py"],
    "concept_eraser/methods/natural_gradient.py": [
        LAWS,
        OPTIONS,
        METHODS + "fisher.py",
        METHODS + "natural_gradient.py",
    ],
    "concept_eraser/methods/ngdiff.py": [LAWS, OPTIONS, METHODS + "baselines.py"],
    "concept_eraser/methods/cpe.py": [LAWS, OPTIONS, METHODS + "cpe.py"],
    "concept_eraser/methods/oce.py": [LAWS, OPTIONS, METHODS + "oce.py"],
    "concept_eraser/methods/race.py": [LAWS, OPTIONS, METHODS + "race.py"],
    "concept_eraser/methods/rece.py": [LAWS, OPTIONS, METHODS + "rece.py"],
    "concept_eraser/methods/relearning.py": [METHODS + "relearning.py"],
    "concept_eraser/methods/resalign.py": [LAWS, OPTIONS, METHODS + "relearning.py"],
    "concept_eraser/methods/scrub.py": [LAWS, OPTIONS, METHODS + "scrub.py"],
    "concept_eraser/methods/speed.py": [LAWS, OPTIONS, METHODS + "speed.py"],
    "concept_eraser/methods/ssd.py": [LAWS, OPTIONS, METHODS + "ssd.py"],
    "concept_eraser/methods/stereo.py": [LAWS, OPTIONS, METHODS + "stereo.py"],
    "concept_eraser/methods/surgery.py": [LAWS, OPTIONS, METHODS + "baselines.py"],
    "concept_eraser/methods/torchjd.py": [
        LAWS,
        OPTIONS,
        METHODS + "torchjd.py",
        METHODS + "baselines.py",
    ],
    "concept_eraser/methods/uce.py": [LAWS, OPTIONS, METHODS + "uce.py", METHODS + "rece.py"],
    "concept_eraser/methods/uno.py": [LAWS, OPTIONS, METHODS + "uno.py"],
    "concept_eraser/methods/unrolled.py": [METHODS + "moml.py", METHODS + "moco.py"],
    "concept_eraser/methods/weighted.py": [LAWS, OPTIONS, METHODS + "baselines.py"],
    "concept_eraser/methods/vectors.py": ["tests/methods/test_vectors.py", LAWS],
    "concept_eraser/evaluation/statistics.py": ["tests/evaluation/test_statistics.py"],
    "concept_eraser/storage/cache.py": [STORAGE + "cache.py"],
    "concept_eraser/storage/digests.py": [STORAGE + "digests.py", STORAGE + "cache.py"],
    "concept_eraser/storage/locks.py": [STORAGE + "locks.py", STORAGE + "writers.py"],
    "concept_eraser/storage/manifest.py": [STORAGE + "manifest.py", STORAGE + "writers.py"],
    "concept_eraser/storage/output_folder.py": [
        STORAGE + "output_folder.py",
        STORAGE + "manifest.py",
    ],
    "concept_eraser/storage/readers.py": ["tests/storage/test_readers.py"],
    "concept_eraser/storage/writers.py": [STORAGE + "writers.py", STORAGE + "manifest.py"],
}

# --- the mutants of a module ----------------------------------------------------------------------

SWAPS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.MatMult: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One fault. `function` is the outermost function it lies in, () where it lies in none."""

    place: tuple[ast.AST, str, int | None]  # parent, field, position in a list
    new: ast.AST
    function: tuple[str, ...]
    line: int
    original: str
    mutant: str

    @property
    def key(self) -> str:
        names = [one for one in self.function if one != "def"]
        return f"{'.'.join(names) or 'module'}: {self.original} -> {self.mutant}"

    def apply(self) -> None:
        _set(self.place, self.new)


def _get(place: tuple[ast.AST, str, int | None]) -> Any:
    value = getattr(place[0], place[1])
    return value if place[2] is None else value[place[2]]


def _set(place: tuple[ast.AST, str, int | None], node: Any) -> None:
    if place[2] is None:
        setattr(place[0], place[1], node)
    else:
        getattr(place[0], place[1])[place[2]] = node


def mutants(tree: ast.Module) -> list[Mutant]:
    """All mutants of a module, in the order of its lines; two of one text at two places have two
    numbers.
    """
    found = list(_inside(tree, (), None))
    times: dict[str, int] = {}
    numbered = []
    for one in found:
        times[one.key] = number = times.get(one.key, 0) + 1
        text = one.mutant if number == 1 else f"{one.mutant} ({number})"
        numbered.append(Mutant(one.place, one.new, one.function, one.line, one.original, text))
    return numbered


def _inside(
    node: ast.AST, function: tuple[str, ...], statement: ast.stmt | None
) -> Iterator[Mutant]:
    for field, value in ast.iter_fields(node):
        if _left_out(node, field):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _is_no_code(child):
                continue
            place = (node, field, i if isinstance(value, list) else None)
            inner = child if isinstance(child, ast.stmt) else statement
            where = function
            if isinstance(node, ast.FunctionDef) and field == "body" and function[:1] != ("def",):
                where = ("def", *function, node.name)
            elif isinstance(node, ast.ClassDef) and function[:1] != ("def",):
                where = (*function, node.name)
            for new in _variants(child, node, field):
                yield _described(place, child, new, where, inner)
            yield from _inside(child, where, inner)


def _left_out(node: ast.AST, field: str) -> bool:
    return field in ("annotation", "returns", "decorator_list", "ctx", "bases") or isinstance(
        node, ast.Raise
    )


def _is_no_code(node: ast.AST) -> bool:
    """Docstrings, imports, assertions, `__repr__`, protocols, abstract methods, `strict=`,
    `dtype=`, `device=`.
    """
    if isinstance(node, ast.FunctionDef):
        return node.name == "__repr__" or any(
            "abstractmethod" in ast.unparse(one) for one in node.decorator_list
        )
    if isinstance(node, ast.ClassDef):
        return any("Protocol" in ast.unparse(one) for one in node.bases)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return (
        isinstance(node, ast.keyword) and node.arg in ("strict", "repr", "dtype", "device")
    ) or isinstance(node, ast.Import | ast.ImportFrom | ast.Assert)


def _described(
    place: tuple, old: Any, new: Any, function: tuple[str, ...], statement: Any
) -> Mutant:
    """The mutant with the statement's text before and after, cut off around the difference."""
    whole = statement if statement is not None else old
    before = _header(whole)
    if old is whole:
        after = _header(new)
    else:
        _set(place, new)
        after = _header(whole)
        _set(place, old)
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    start = max(0, start - 50)
    line = getattr(old, "lineno", getattr(whole, "lineno", 0))
    return Mutant(
        place, new, function, line, before[start : start + 110], after[start : start + 110]
    )


def _header(node: ast.AST) -> str:
    if isinstance(node, ast.ExceptHandler):
        return " ".join(ast.unparse(node).split())
    lines = [line for line in ast.unparse(node).splitlines() if not line.startswith("@")]
    return lines[0] if isinstance(node, ast.stmt) and hasattr(node, "body") else " ".join(lines)


def _variants(node: Any, parent: ast.AST, field: str) -> Iterator[ast.AST]:
    """What a node is replaced by: one node for each mutant."""
    for new in _replacements(node, parent, field):
        yield ast.fix_missing_locations(ast.copy_location(new, node))


def _replacements(node: Any, parent: Any, field: str) -> Iterator[ast.AST]:
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                for swap in SWAPS[type(operator)]:
                    yield ast.Compare(
                        node.left, [*node.ops[:i], swap(), *node.ops[i + 1 :]], node.comparators
                    )
        case ast.BinOp() if not any(_is_text(side) for side in (node.left, node.right)):
            for swap in SWAPS.get(type(node.op), ()):
                yield ast.BinOp(node.left, swap(), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(SWAPS[type(node.op)][0](), node.values)
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant():
            yield from map(ast.Constant, _other_values(node.value))
        case ast.Slice():
            if node.lower is not None:
                yield ast.Slice(None, node.upper, node.step)
            if node.upper is not None:
                yield ast.Slice(node.lower, None, node.step)
        case ast.Name() if node.id in NAMES and isinstance(parent, ast.Call) and field == "func":
            yield ast.Name(NAMES[node.id], ast.Load())
        case ast.Attribute() if (
            node.attr in NAMES and isinstance(parent, ast.Call) and field == "func"
        ):
            yield ast.Attribute(node.value, NAMES[node.attr], ast.Load())
        case ast.keyword() if node.arg in ("min", "max"):
            yield ast.keyword(NAMES[node.arg], node.value)
        case ast.Return() if node.value is not None and ast.unparse(node.value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Assign() if any(
            isinstance(t, ast.Subscript | ast.Attribute) for t in node.targets
        ):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()
            for swap in SWAPS.get(type(node.op), ()):
                yield ast.AugAssign(node.target, swap(), node.value)
        case ast.ExceptHandler() if not (
            isinstance(node.body[0], ast.Raise) and node.body[0].exc is None
        ):
            yield ast.ExceptHandler(node.type, node.name, [ast.Raise()])
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
    is_test = field in ("test", "ifs") and not isinstance(node, ast.Compare | ast.BoolOp)
    if is_test and not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        yield ast.UnaryOp(ast.Not(), node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):  # the sign of a guard against division by zero makes no difference
        return [value + 1, -value] if abs(value) > 1e-6 else [value + 1]
    return []


# --- running them ---------------------------------------------------------------------------------


class Recorder:
    """A pytest plugin: whether a test failed, how long each takes and which lines of the module it
    reaches.
    """

    def __init__(self, loop: Callable[[Any, Recorder], None]) -> None:
        self.loop, self.failed = loop, False
        self.failures: list[str] = []
        self.seconds: dict[str, float] = {}

    def pytest_runtestloop(self, session: Any) -> bool | None:
        if session.testsfailed:
            return None
        self.loop(session, self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = True
            self.failures.append(report.nodeid)

    def run(
        self,
        items: list[Any],
        before: Callable[[Any], None] = lambda item: None,
        *,
        stop: bool = True,
    ) -> None:
        for i, item in enumerate(items):
            before(item)
            following = items[i + 1] if i + 1 < len(items) else None
            began = _processor_seconds()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self.seconds[item.nodeid] = _processor_seconds() - began
            if self.failed and stop:
                return


def _processor_seconds() -> float:
    """What this process and its ended children have used of the processor, in the program and in
    the system.
    """
    return sum(os.times()[:4])


def _pytest(files: list[str], recorder: Recorder, scratch: Path) -> int:
    import pytest

    options = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:randomly",
        "-p",
        "no:faulthandler",
        "-o",
        "timeout=0",
    ]
    options += ["--basetemp", str(scratch / f"tmp-{os.getpid()}"), "--no-header", "--no-summary"]
    return int(
        pytest.main(
            [*options, *(file for file in files if (ROOT / file).exists())], plugins=[recorder]
        )
    )


def _in_child(work: Callable[[], int], seconds: float) -> int | None:
    """The exit code of `work` in a fork of this process; None where it took longer, 70 where it
    raised.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = work()
        except BaseException as error:
            if os.environ.get("MUTANTS_DEBUG"):
                print(f"{type(error).__name__}: {error}", file=sys.__stderr__)
        finally:
            os._exit(code)
    end, pause = time.monotonic() + seconds, 0.002
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, pause * 1.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _silence() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not os.environ.get("MUTANTS_DEBUG"):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)


def _spare_other_processes() -> None:
    """Let no mutant of `os.kill(pid, 0)` end a process that its own test did not start, such as
    this program.
    """
    kill = os.kill

    def guarded(process: int, number: int) -> None:
        import pytest

        if number != 0 and not _is_own_child(process):
            pytest.fail(f"signal {number} to the process {process}, which the test did not start")
        kill(process, number)

    os.kill = guarded


def _is_own_child(process: int) -> bool:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return process > 0 and int(fields[1]) == os.getpid()


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _patch(
    path: str, code: CodeType, mutant: Mutant, functions: dict[tuple[str, int], list[FunctionType]]
) -> None:
    """Put the mutant into the loaded module. Raises ImportError where such a module cannot be
    imported.
    """
    module = sys.modules[path.removesuffix(".py").replace("/", ".")]
    fresh: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    try:
        exec(code, fresh)
    except Exception as error:
        raise ImportError(str(error)) from error
    if mutant.function[:1] != ("def",):
        _take_values(module, fresh)
    name = ".".join(mutant.function[1:])
    for one in _codes(code):
        if one.co_qualname != name:
            continue
        for function in functions.get((name, one.co_firstlineno), ()):
            if function.__code__.co_freevars == one.co_freevars:
                function.__code__ = one
            else:  # `super()` is gone, and with it the cell of its class
                owner = getattr(module, mutant.function[1])
                setattr(
                    owner, mutant.function[2], vars(fresh[mutant.function[1]])[mutant.function[2]]
                )
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


BROKEN = 71  # exit code of a child where this program failed, not the mutant
VALUES = int | float | str | tuple | frozenset | dict | None


def _take_values(old: Any, fresh: Mapping[str, Any]) -> None:
    """Give a module or a class the values and default arguments of its mutant, and what dataclass
    wrote for it.
    """
    for name, new in fresh.items():
        known = vars(old).get(name)
        if isinstance(new, FunctionType) and isinstance(known, FunctionType):
            if new.__code__.co_filename == "<string>" and name not in (
                "__setattr__",
                "__delattr__",
            ):
                setattr(old, name, new)
            elif new.__module__ == known.__module__:
                known.__defaults__, known.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
        elif (
            isinstance(new, type)
            and isinstance(known, type)
            and new.__module__ == fresh.get("__name__")
        ):
            _take_values(known, dict(vars(new)))
        elif name == "__dataclass_fields__" or (
            isinstance(new, VALUES) and not name.startswith("__")
        ):
            setattr(old, name, new)


def _serve(
    path: str, tree: ast.Module, chosen: list[Mutant], answer: Path, scratch: Path, budget: float
) -> Callable:
    """The test loop of a process that has collected the tests: baseline, then a fork for each
    mutant in a function.
    """

    def loop(session: Any, recorder: Recorder) -> None:
        import gc

        items, full = list(session.items), str(ROOT / path)
        baseline = scratch / "baseline.json"
        if _in_child(lambda: _baseline(items, recorder, full, baseline), 3600) != 0:
            raise RuntimeError(f"the tests of {path} end their process without any mutant")
        measured = json.loads(baseline.read_text())
        if measured["failures"]:
            raise RuntimeError(f"tests fail without any mutant: {measured['failures']}")
        seconds, lines = measured["seconds"], {k: set(v) for k, v in measured["lines"].items()}
        ordered = sorted(items, key=lambda item: seconds[item.nodeid])
        functions: dict[tuple[str, int], list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and one.__code__.co_filename == full:
                functions.setdefault(
                    (one.__code__.co_qualname, one.__code__.co_firstlineno), []
                ).append(one)
        gc.collect()
        gc.freeze()  # else the collector of every child copies all pages
        verdicts: dict[str, str] = {}
        for mutant in chosen:
            spans = _lines_of(mutant)
            in_function = mutant.function[:1] == ("def",)
            if in_function:
                reached = [item for item in ordered if lines[item.nodeid] & spans]
            else:  # of a value: first those that run the module at all
                reached = sorted(ordered, key=lambda item: not lines[item.nodeid])
            reached = _affordable(reached, [seconds[item.nodeid] for item in reached], budget)

            limit = math.ceil(8 + 6 * sum(seconds[item.nodeid] for item in reached))

            def work(
                mutant: Mutant = mutant, reached: list[Any] = reached, limit: int = limit
            ) -> int:
                _silence()
                resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
                _spare_other_processes()
                mutant.apply()
                try:
                    _patch(path, compile(tree, full, "exec"), mutant, functions)
                except ImportError:
                    return 1
                except Exception:
                    return BROKEN
                recorder.run(reached)
                return int(recorder.failed)

            code = _in_child(work, PATIENCE * limit)
            if code == BROKEN:
                raise RuntimeError(
                    f"{path}, line {mutant.line}: cannot be put into the module: {mutant.key}"
                )
            ended_late = code is None or code == -signal.SIGXCPU
            verdict = "timeout" if ended_late else "survived" if code == 0 else "killed"
            verdicts[mutant.key] = verdict if reached else "not reached"
        answer.write_text(json.dumps(verdicts))

    return loop


def _affordable(tests: list[Any], seconds: list[float], budget: float) -> list[Any]:
    """The first tests, until the budget is spent; one at least."""
    spent, number = 0.0, 0
    while number < len(tests) and (number == 0 or spent + seconds[number] <= budget):
        spent, number = spent + seconds[number], number + 1
    return tests[:number]


def _lines_of(mutant: Mutant) -> set[int]:
    """The lines on which the interpreter may report the mutated statement; of a handler its
    body's.
    """
    old = _get(mutant.place)
    if isinstance(old, ast.ExceptHandler):
        return set(range(old.lineno, (old.body[-1].end_lineno or old.lineno) + 1))
    return (
        set(range(old.lineno, (old.end_lineno or old.lineno) + 1))
        if hasattr(old, "lineno")
        else {mutant.line}
    )


def _baseline(items: list[Any], recorder: Recorder, full: str, answer: Path) -> int:
    """Run all tests; write seconds, lines reached and failures."""
    _silence()
    lines: dict[str, set[int]] = {}
    current: set[int] = set()

    def local(frame: Any, event: str, argument: Any) -> Any:
        current.add(frame.f_lineno)
        return local

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return local(frame, event, argument) if frame.f_code.co_filename == full else None

    def before(item: Any) -> None:
        nonlocal current
        current = lines[item.nodeid] = set()

    sys.settrace(trace)
    recorder.run(items, before, stop=False)
    sys.settrace(None)
    content = {"seconds": recorder.seconds, "lines": {k: sorted(v) for k, v in lines.items()}}
    answer.write_text(json.dumps(content | {"failures": recorder.failures}))
    return 0


def run_module(
    path: str, known: dict[str, Any] | None, *, survivors_only: bool, most: int, budget: float
) -> dict[str, Any]:
    """The result of one module. known: what the last run wrote about it."""
    digest = _digest(path)
    tree = ast.parse((ROOT / path).read_text())
    every = mutants(tree)
    again = survivors_only and known is not None and known["source"] == digest
    size = known["mutants"] if again and known else min(most, len(every))
    drawn = set(random.Random(SEED).sample(range(len(every)), size))
    chosen = [one for i, one in enumerate(every) if i in drawn]
    reasons = {one["key"]: one.get("reason", "") for one in (known or {}).get("survivors", [])}
    asked = [one for one in chosen if one.key in reasons] if again else chosen
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        verdicts = _verdicts(path, tree, asked, scratch, budget)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    timeouts = sum(v == "timeout" for v in verdicts.values()) + (
        known["timeouts"] if again and known else 0
    )
    alive = [one for one in asked if verdicts[one.key] in ("survived", "not reached")]
    listed = [
        {
            "line": one.line,
            "key": one.key,
            "reached": verdicts[one.key] == "survived",
            "reason": reasons.get(one.key, ""),
        }
        for one in alive
    ]
    return {
        "source": digest,
        "generated": len(every),
        "mutants": len(chosen),
        "killed": len(chosen) - len(alive),
        "timeouts": timeouts,
        "seconds": round(time.monotonic() - began),
        "survivors": listed,
    }


def _of(path: str) -> list[Mutant]:
    return mutants(ast.parse((ROOT / path).read_text()))


def _digest(path: str) -> str:
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:12]


def _verdicts(
    path: str, tree: ast.Module, asked: list[Mutant], scratch: Path, budget: float
) -> dict[str, str]:
    answer = scratch / "answer.json"

    def server() -> int:
        if not os.environ.get("MUTANTS_DEBUG"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _pytest(
            TESTS[path], Recorder(_serve(path, tree, asked, answer, scratch, budget)), scratch
        )

    code = _in_child(server, 6 * 3600)
    if code != 0 or not answer.exists():
        raise SystemExit(
            f"{path}: its tests could not be collected or fail without a mutant (exit "
            f"code {code}); run them: pytest {' '.join(TESTS[path])}"
        )
    return json.loads(answer.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Mutation testing of methods, vectors, statistics and storage."
    )
    parser.add_argument("modules", nargs="*", help="parts of paths, e.g. munba; all without")
    parser.add_argument("--survivors", action="store_true", help="only what survived the last run")
    parser.add_argument(
        "--missing", action="store_true", help="only modules whose source has no result yet"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="leave out modules that would take longer",
    )
    parser.add_argument("--most", type=int, default=MOST, help="mutants a module at most")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds of tests a mutant")
    parser.add_argument("--count", action="store_true", help="only say how many mutants there are")
    options = parser.parse_args()
    paths = [
        p for p in TESTS if not options.modules or any(Path(p).stem == m for m in options.modules)
    ]
    if options.count:
        counts = {path: len(_of(path)) for path in paths}
        print(
            "\n".join(f"{n:5} {path}" for path, n in counts.items()),
            f"\n{sum(counts.values()):5} in all",
        )
        return
    began = time.monotonic()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONHASHSEED="0")
    os.chdir(ROOT)
    for name in PRELOADED.split():
        importlib.import_module(name)
    import hypothesis
    import torch

    torch.set_num_threads(1)
    # a failing example need not be made small
    generate = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", phases=generate, database=None, derandomize=True
    )
    hypothesis.settings.load_profile("mutants")
    for path in paths:
        known = _results().get(path)
        if options.missing and known is not None and known["source"] == _digest(path):
            continue
        number = (
            len(known["survivors"])
            if known and options.survivors
            else min(options.most, len(_of(path)))
        )
        if time.monotonic() - began + 12 + 0.45 * number > options.seconds:
            print(f"{path}: left out, --seconds would not be enough", flush=True)
            continue
        how = {"survivors_only": options.survivors, "most": options.most, "budget": options.budget}
        found = run_module(path, known, **how)
        RESULT.write_text(_as_text(_results() | {path: found}))  # another process may have written
        share = found["killed"] / max(1, found["mutants"])
        print(
            (
                f"{path}: {found['killed']} of {found['mutants']} killed ({share:.1%}), "
                f"{found['seconds']} s"
            ),
            flush=True,
        )


def _results() -> dict[str, Any]:
    """What the last runs wrote, by module."""
    return json.loads(RESULT.read_text())["modules"] if RESULT.exists() else {}


def _as_text(modules: dict[str, Any]) -> str:
    """The result with its totals; modules in the order of TESTS, a line for each survivor."""
    generated, total, killed = (
        sum(one[field] for one in modules.values()) for field in ("generated", "mutants", "killed")
    )
    head = {
        "command": "python -m tests.campaigns.mutants",
        "seed": SEED,  # of the sample, where fewer were tried than there are
        "generated": generated,
        "mutants": total,
        "killed": killed,
        "share": round(killed / max(1, total), 4),
    }
    ordered = {path: modules[path] for path in TESTS if path in modules}
    text = json.dumps(head | {"modules": ordered}, indent=1)
    for module in ordered.values():
        for one in module["survivors"]:
            text = text.replace(_indented(one), json.dumps(one))
    return text + "\n"


def _indented(one: dict[str, Any]) -> str:
    return json.dumps(one, indent=1).replace("\n", "\n" + " " * 4)


if __name__ == "__main__":
    main()

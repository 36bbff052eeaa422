"""Run checks in a process where Triton interprets its kernels on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def checked_by_interpreter(module: str, names: str) -> dict[str, Any]:
    """Return name -> result of `check_triton` of a test module, for all names of one of its collections.

    One process for all: the interpreter must be chosen before Triton is imported.

    Args:
        module: the test module, which has `check_triton(name)`; its result is valid JSON.
        names: the collection in it.
    """
    pytest.importorskip("triton", reason="Triton is not installed here")
    code = (
        f"import sys, json; sys.path.insert(0, sys.argv[1]); import conftest, {module} as t; "
        f"print(json.dumps({{name: t.check_triton(name) for name in t.{names}}}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])

"""Scanners for unsafe pickles, each asked in an environment of its own: PyPI's, as they are installed.

`DCPTOOL_SCANNERS` names a folder with an environment for each, made once, as `python -m tests.pickles.scanners DIR`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

_PACKAGES = {"picklescan": ["picklescan"], "modelscan": ["modelscan"], "hayward": ["hayward"],
             "fickling": ["fickling", "typing_extensions"]}  # fmt: skip
SCANNERS = tuple(_PACKAGES)
_ASKING = {
    "picklescan": """
from picklescan.scanner import scan_file_path
def critical(path):
    return scan_file_path(path).infected_files > 0
""",
    "modelscan": """
from modelscan.modelscan import ModelScan
def critical(path):
    found = ModelScan().scan(path)["summary"]["total_issues_by_severity"]
    return found["CRITICAL"] + found["HIGH"] > 0
""",
    "hayward": """
from pathlib import Path
from hayward import ModelFileScanner
def critical(path):
    found = ModelFileScanner().scan_file(Path(path))
    return any(finding.severity.value in ("critical", "high") for finding in found)
""",
    "fickling": """
import zipfile
from fickling.analysis import Severity
from fickling.loader import scan_file, scan_zip_archive
def critical(path):
    is_zip = open(path, "rb").read(2) == b"PK"
    found = scan_zip_archive(path, graceful=True).values() if is_zip else [scan_file(path, graceful=True)]
    return any(one.severity >= Severity.LIKELY_OVERTLY_MALICIOUS for one in found)
""",
}
_ASKING_FOLDERS = {
    "picklescan": """
from picklescan.scanner import scan_directory_path
def critical(path):
    return scan_directory_path(path).infected_files > 0
""",
    "modelscan": _ASKING["modelscan"],
    "hayward": _ASKING["hayward"].replace("scan_file", "scan_directory"),
}
FOLDERS = tuple(_ASKING_FOLDERS)
_LOOP = """
import json, logging, os, sys
logging.disable()
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
found = []
for path in json.loads(sys.stdin.read()):
    try:
        found.append(bool(critical(path)))
    except Exception:
        found.append(None)
os.write(answers, json.dumps(found).encode())
"""


def install(folder: Path, constraints: Path | None = None) -> None:
    """Make an environment for each scanner in a folder, but for those that are there."""
    for name, packages in _PACKAGES.items():
        python = folder / name / "bin" / "python"
        if not python.exists():
            venv.create(folder / name, with_pip=True)
        options = ["-c", str(constraints)] if constraints else []
        subprocess.run([python, "-m", "pip", "install", "-q", *options, *packages], check=True)


def ask(folder: Path, name: str, paths: Sequence[Path]) -> list[bool | None]:
    """Return, of each file, whether a scanner calls it critical; None where it gives no answer."""
    return _asked(folder / name, _ASKING[name], paths)


def ask_folders(folder: Path, name: str, paths: Sequence[Path]) -> list[bool | None]:
    """Return, of each folder, whether a scanner of folders calls anything in it critical."""
    return _asked(folder / name, _ASKING_FOLDERS[name], paths)


def _asked(environment: Path, asking: str, paths: Sequence[Path]) -> list[bool | None]:
    given = json.dumps([str(path) for path in paths])
    command = [environment / "bin" / "python", "-c", asking + _LOOP]
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True, env=_ENVIRONMENT)
    answers: list[bool | None] = json.loads(done.stdout)
    return answers


_ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

if __name__ == "__main__":
    install(Path(sys.argv[1]))

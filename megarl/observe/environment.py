"""`environment.json`: what a run ran on and from, so that it can be told from another run's.

No secrets: environment variables are taken from a list of names, never all of them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ENVIRONMENT_FILE = "environment.json"

PACKAGES = (
    "megarl",
    "torch",
    "megatron-core",
    "sglang",
    "transformers",
    "tokenizers",
    "sentencepiece",
    "safetensors",
    "latex2sympy2_extended",
    "antlr4-python3-runtime",
    "sympy",
    "mpmath",
    "jsonschema",
    "pyarrow",
    "zstandard",
    "numpy",
    "pydantic",
    "ruamel.yaml",
    "blake3",
    "filelock",
    "protobuf",
    "tensorboard",
    "rich",
    "triton",
    "flashinfer-python",
    "transformer-engine",
    "flash-attn",
)

VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "VIRTUAL_ENV",
    "MEGARL_PYTHON",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHDYNAMO_DISABLE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "GLOO_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_NTASKS",
    "SLURM_RESTART_COUNT",
)

_SECRET = re.compile(r"^(.*(?:password|passwd|secret|api_?key|token)=).+$", re.IGNORECASE)


def environment(hosts: Sequence[str]) -> dict[str, Any]:
    """Facts about this process and its machine, ready for JSON; `hosts` are all ranks', by rank.

    `git` is absent when the package does not lie in a checkout that tracks it.
    """
    facts: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": [_SECRET.sub(r"\1***", argument) for argument in sys.argv],
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "hosts": list(hosts),
        "packages": package_versions(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    git = git_state(Path(__file__).resolve().parent)
    return facts | ({"git": git} if git else {})


def write_environment(path: Path, hosts: Sequence[str]) -> None:
    """Write `environment(hosts)` to `path`; the file appears only when whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(path.name + ".tmp")
    whole.write_text(json.dumps(environment(hosts), indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


def git_state(folder: Path) -> dict[str, Any] | None:
    """`{"revision": …, "dirty": …}` of the checkout that tracks the files of `folder`, or None.

    `dirty` also counts files that git neither tracks nor ignores: they may be code that ran.
    """
    if not _git(folder, "ls-files", "."):
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain")
    if revision is None or changes is None:
        return None
    return {"revision": revision, "dirty": changes != ""}


def _git(folder: Path, *arguments: str) -> str | None:
    """Git's answer, None when there is no git, no checkout, or no answer in 10 s."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

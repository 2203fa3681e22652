"""What every rank imports, done once: the tests' fork server loads this module.

A rank's imports (torch, megatron, SGLang) take 6 s of a core. Processes forked from the server have
them done, in a real rank's order; nothing else runs and no thread is started. On a machine with a
GPU nothing is loaded, since the imports ask CUDA, which forked processes could not use any more.
"""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

from megarl.platforms import platform_of
from megarl.process import _work

if not Path("/dev/nvidiactl").exists():
    platform_of("cpu").prepare()
    _work(None, None)
    # The engine would import every model that SGLang has when the first one is built.
    importlib.import_module("sglang.srt.models.registry")
    gc.collect()
    gc.freeze()  # the first collection of a forked process would copy every page

"""megarl: reinforcement learning of language models on Megatron-Core with in-process SGLang."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.21"
"""The one SGLang that megarl's generator is written against."""
SGLANG_INSTALL = f"pip install --no-deps sglang=={SGLANG_VERSION}"

# No extra can install it: SGLang's own metadata asks for the whole CUDA set. Recipes, algorithms
# and conversion work without it, so this is a word and no error; the generator refuses to start.
if find_spec("sglang") is None:
    print(f"megarl: SGLang is not installed: {SGLANG_INSTALL}", file=sys.stderr)

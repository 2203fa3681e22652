"""What every rank imports, done once: the fork server loads this module. SGLang before megatron.

SGLang's registry imports every model that it has; the first engine of a process would.
"""

from __future__ import annotations

import gc
import warnings

from megarl.platforms import platform_of, prepare_sglang

warnings.simplefilter("ignore")  # both libraries tell what they do without
platform_of("cpu").prepare()
prepare_sglang()

import sglang.srt.models.registry  # noqa: E402, F401
import transformers.modeling_utils  # noqa: E402, F401

import megarl.rollout.generator  # noqa: E402, F401
import tools.layouts.ranks  # noqa: E402, F401

gc.collect()
gc.freeze()  # the first collection of a forked process would copy every page

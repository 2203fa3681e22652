"""megarl: reinforcement learning of language models on Megatron-Core with in-process SGLang."""

__version__ = "0.1.0"

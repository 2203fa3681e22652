"""Model folders of one format into another: Hugging Face, GGUF, megatron's `torch_dist`."""

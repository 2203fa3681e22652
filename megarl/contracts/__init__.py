"""What all parts agree on. Plain Python and numpy: no megatron, no sglang, no torch.distributed."""

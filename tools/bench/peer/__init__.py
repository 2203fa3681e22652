"""Comparison with TRL's GRPOTrainer: the same model, task and work on the same machine."""

"""Held-out evaluation: generated, scored, estimated with intervals, written down, compared."""

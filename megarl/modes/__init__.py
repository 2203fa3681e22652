"""Launches besides the whole loop: one part of it alone, or sealed iterations once more."""

"""Sealed experience on disk: what every trained token came from, and what was made of it."""

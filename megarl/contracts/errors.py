"""What a person gave and the program cannot use."""

from __future__ import annotations


class InputError(ValueError):
    """Settings, a model folder, data or a scorer that cannot be used; one line, what to change.

    A launch that ends with one before it has weights ends with exit code 2.
    """

    told_by_all = False
    """Whether all ranks raise it in the same words: then which rank tells it, and where its log
    is, says nothing."""

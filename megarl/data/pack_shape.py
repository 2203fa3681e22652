"""What a layout asks of the lengths of packs, and the padding that gives it to them.

Decided once, before anything is scored, so that log-probs and updates share their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.contracts.mesh import Mesh
from megarl.data.packing import Pack, pad_pack


@dataclass(frozen=True, slots=True)
class PackShape:
    """Packs as they come when everything is at its default."""

    one_length: bool = False
    """All packs of a data-parallel part: pipeline stages exchange hidden states of one shape."""
    across_parts: bool = False
    """And of all parts: their ranks gather the tokens of one another for their experts."""
    multiple: int = 1
    """Of which every length is one: sequence-parallel ranks hold equal shares of the tokens."""

    @classmethod
    def of(cls, mesh: Mesh, *, experts: bool, sequence_parallel: bool) -> PackShape:
        """`experts`: whether the model has some."""
        across = experts and mesh.tp % (mesh.etp * mesh.ep) != 0
        return cls(
            one_length=mesh.pp > 1 or across,
            across_parts=across,
            multiple=mesh.tp if sequence_parallel else 1,
        )

    def pad(
        self, packs: Sequence[Sequence[Pack]], maximum: Callable[[float], float]
    ) -> list[list[Pack]]:
        """`packs[minibatch][pack]` of this rank, padded.

        `maximum`: the largest of all ranks' numbers (`World.maximum`); it is asked once, on every
        rank, and only where lengths must agree across data-parallel parts.
        """
        longest = max((len(pack.token_ids_T) for part in packs for pack in part), default=0)
        if self.across_parts:
            longest = int(maximum(longest))
        return [
            [
                pad_pack(pack, self._rounded(longest if self.one_length else len(pack.token_ids_T)))
                for pack in part
            ]
            for part in packs
        ]

    def _rounded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

"""Trades between packs and between data-parallel parts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.leveling import level_packs, level_parts

PACKS = st.lists(st.lists(st.integers(1, 50), max_size=6), min_size=1, max_size=8)


def _numbered(sizes: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """(rows of every pack, the size of every row)."""
    flat = [size for pack in sizes for size in pack]
    rows = iter(range(len(flat)))
    return [[next(rows) for _ in pack] for pack in sizes], flat


def _loads(packs: list[list[int]], sizes: list[int]) -> list[int]:
    return [sum(sizes[row] for row in rows) for rows in packs]


@settings(max_examples=200, deadline=None)
@given(sizes=PACKS)
def test_rows_stay_and_the_heaviest_pack_never_grows(sizes) -> None:
    packs, flat = _numbered(sizes)
    leveled = level_packs(packs, flat)
    assert sorted(row for rows in leveled for row in rows) == list(range(len(flat)))
    assert len(leveled) == len(packs)
    assert max(_loads(leveled, flat)) <= max(_loads(packs, flat))
    assert leveled == level_packs(packs, flat)


@settings(max_examples=200, deadline=None)
@given(sizes=PACKS, per_part=st.integers(1, 3), spare=st.integers(0, 20))
def test_no_trade_between_parts_makes_a_pack_too_long(sizes, per_part, spare) -> None:
    sizes += [[]] * (-len(sizes) % per_part)
    packs, flat = _numbered(sizes)
    room = max(_loads(packs, flat)) + spare
    work = [size * (20 + size) for size in flat]
    parts = [packs[at : at + per_part] for at in range(0, len(packs), per_part)]
    leveled = level_parts(parts, flat, work, room)
    rows = [row for part in leveled for pack in part for row in pack]
    assert sorted(rows) == list(range(len(flat)))
    assert [len(part) for part in leveled] == [per_part] * len(parts)
    assert max(load for part in leveled for load in _loads(part, flat)) <= room
    before, after = (
        max(sum(work[row] for pack in part for row in pack) for part in every)
        for every in (parts, leveled)
    )
    assert after <= before


def test_a_trade_finds_what_greedy_packing_does_not() -> None:
    """3 2 2 | 3 2 become 3 3 | 2 2 2."""
    sizes = [3, 2, 2, 3, 2]
    assert _loads(level_packs([[0, 1, 2], [3, 4]], sizes), sizes) == [6, 6]
    assert _loads(level_packs([[0, 1, 2, 3, 4], []], sizes), sizes) == [6, 6]


def test_parts_trade_until_work_is_level_where_there_is_room() -> None:
    sizes = [8, 8, 4, 4]
    parts = [[[0], [1]], [[2], [3]]]
    leveled = level_parts(parts, sizes, sizes, 8)
    assert sorted(sum(sizes[row] for pack in part for row in pack) for part in leveled) == [12, 12]
    tight = level_parts([[[0]], [[1], []]], [5, 4, 1], [5, 4, 1], 5)
    assert tight == [[[0]], [[1], []]]

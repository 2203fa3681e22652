"""Units of measurement and money behind a number: `5 cm`, `$18`, `90^\\circ`, `3 square metres`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_SIZES: dict[str, dict[str, Fraction | int]] = {
    "length": {
        "mm millimeter millimetre": Fraction(1, 1000), "cm centimeter centimetre": Fraction(1, 100),
        "dm decimeter decimetre": Fraction(1, 10), "m meter metre": 1,
        "km kilometer kilometre": 1000,
        "in inch inches": Fraction(254, 10000), "ft foot feet": Fraction(3048, 10000),
        "yd yard": Fraction(9144, 10000), "mi mile": Fraction(1609344, 1000),
    },
    "mass": {
        "mg milligram": Fraction(1, 1000), "g gram": 1, "kg kilogram kilo": 1000,
        "t ton tonne": 10**6, "lb lbs pound": Fraction(45359237, 100000),
        "oz ounce": Fraction(45359237, 1600000),
    },
    "time": {
        "ms millisecond": Fraction(1, 1000), "s sec second": 1, "min minute": 60,
        "h hr hour": 3600, "day": 86400, "week": 604800,
    },
    "calendar": {"month": 1, "year yr": 12},
    "volume": {
        "ml milliliter millilitre": Fraction(1, 1000), "cl centiliter centilitre": Fraction(1, 100),
        "l liter litre": 1,
    },
    "gallons": {"gallon gal": 4, "quart qt": 1},
    "degree": {"degree deg": 1}, "radian": {"radian rad": 1},
    "temperature": {"celsius degreecelsius degreec": 1},
    "fahrenheit": {"fahrenheit degreefahrenheit degreef": 1},
    "dollar": {"dollar usd buck": 1, "cent": Fraction(1, 100)},
    "euro": {"euro eur": 1}, "pound": {"poundsterling gbp": 1}, "yen": {"yen jpy": 1},
    "yuan": {"yuan rmb": 1}, "rupee": {"rupee inr": 1},
    "energy": {"j joule": 1, "kj kilojoule": 1000}, "force": {"n newton": 1},
    "power": {"w watt": 1, "kw kilowatt": 1000}, "charge": {"coulomb": 1}, "volt": {"v volt": 1},
    "current": {"amp ampere": 1}, "frequency": {"hz hertz": 1}, "pressure": {"pa pascal": 1},
    "resistance": {"ohm": 1}, "amount": {"mol mole": 1},
}  # fmt: skip
SIZES: dict[str, tuple[str, Fraction]] = {
    name: (dimension, Fraction(factor))
    for dimension, units in _SIZES.items()
    for names, factor in units.items()
    for name in names.split()
}
"""Name in small letters, singular → what it measures, its size in that dimension's own unit."""
AMBIGUOUS = {"pound"}
"""Names of a mass and of money; they are compared by name."""
CASED = {"A": "amp", "V": "volt", "W": "w", "N": "n", "J": "j", "K": "kelvin", "C": "degreec"}


@dataclass(frozen=True, slots=True)
class Unit:
    """A product of powers of base units, with its size in them."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction


@lru_cache(maxsize=512)
def unit(text: str) -> Unit | None:
    """The unit that words name (`cm^2`, `m/s`, `km per hour`); None for other words."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\^\\circ\s*([CF])\b", r" degree\1 ", text)
    text = text.replace(r"^\circ", " degree ").replace(r"\cdot", " ").replace("^", "")
    text = re.sub(r"[{}.()]", " ", text)
    text = re.sub(r"\bper\b", "/", text)
    above, slash, below = text.partition("/")
    powers: dict[str, int] = {}
    size = Fraction(1)
    for part, sign in ((above, 1), (below, -1)):
        found = _product(part)
        if found is None or (slash and not part.strip() and sign < 0):
            return None
        for dimension, factor, power in found:
            powers[dimension] = powers.get(dimension, 0) + sign * power
            size *= factor ** (sign * power)
    used = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(used, size) if used else None


def _product(text: str) -> list[tuple[str, Fraction, int]] | None:
    words = re.sub(r"(?<=[a-zA-Z])\s*(?=[23]\b)", "", text).split()
    found: list[tuple[str, Fraction, int]] = []
    power = 1
    for word in words:
        low = word.casefold()
        if low in ("square", "squared", "sq", "cubic", "cubed", "cu"):
            exponent = 2 if low.startswith("sq") else 3
            if low.endswith("ed"):
                if not found:
                    return None
                found[-1] = (*found[-1][:2], exponent)
            else:
                power = exponent
            continue
        match = re.fullmatch(r"([^\W\d]+)([23])?", word)
        if not match:
            return None
        known = _known(match[1])
        if known is None:
            return None
        found.append((*known, int(match[2] or power)))
        power = 1
    return found


def _known(word: str) -> tuple[str, Fraction] | None:
    low = CASED.get(word, word.casefold())
    for name in (low, low.removesuffix("s"), low.removesuffix("es")):
        if name in AMBIGUOUS:
            return "pound", Fraction(1)
        if name in SIZES and not (name == low.removesuffix("s") != low and len(name) < 2):
            return SIZES[name]
    return None

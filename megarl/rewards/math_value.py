r"""Values of mathematical expressions, and whether two of them are equal.

Expressions are read by latex2sympy (the reader of math-verify) and never simplified: they are
evaluated here, with limits, so that no answer costs more than its length. Rational values are
exact, others computed with mpmath at the precision asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache

import mpmath
import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from sympy.core.function import AppliedUndef

Point = Mapping[sympy.Basic, mpmath.mpf]

MOST_CHARACTERS = 400
"""Of an expression that is parsed; longer ones take seconds."""
DEEPEST = 6
"""Brackets in brackets; the parser's time grows with each."""
MOST_DIGITS = 400
"""In one number inside an expression. Plain numbers may have `MOST_PLAIN_DIGITS`."""
MOST_PLAIN_DIGITS = 20_000
MOST_BARS = 6
"""Signs `|`, of which the parser cannot tell which open; its time doubles with each."""
MOST_BITS = 200_000
"""Of an exact integer, and in base 2 of the size of any value."""
MOST_FACTORIAL = 10_000
CALLED = re.compile(
    r"\\(?:a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|int|sum|prod|lim)(?![a-z])"
)
MOST_CALLS = 12
"""Functions in one expression."""
POINTS = ("0.731", "1.618", "-0.577", "2.236", "-1.414", "3.303", "0.199", "-2.645", "4.123")
"""Values given to letters, each letter starting at another; none is special to a function."""

PLAIN = re.compile(r"([+-]?)\s*(\d*)(?:\.(\d*))?")
FRACTION = re.compile(r"([+-]?)\s*(?:\\frac\{\s*(-?\d+)\s*\}\{\s*(-?\d+)\s*\}|(\d+)\s*/\s*(-?\d+))")
CALLS: dict[str, Callable] = {
    **{name: getattr(mpmath, name) for name in (
        "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc",
        "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "floor", "sign", "re", "im",
        "arg", "factorial", "binomial", "exp", "log",
    )},
    "Add": lambda *terms: mpmath.fsum(terms), "Mul": lambda *factors: mpmath.fprod(factors),
    "Pow": mpmath.power, "UnevaluatedExpr": lambda value: value, "conjugate": mpmath.conj,
    "Abs": abs, "ceiling": mpmath.ceil, "Max": max, "Min": min,
    "Mod": lambda a, b: a - b * mpmath.floor(a / b),
}  # fmt: skip
"""Class of a sympy node → its value from those of its arguments."""


class Unreadable(ValueError):
    """A text that says nothing that can be compared, or costs too much to compare."""


MACHINE_FAILURES = (MemoryError, OSError, ImportError)
"""What is no answer's doing, so that nothing may be made of it but an error."""


class Undefined(ArithmeticError):
    """An expression without a (real) value here."""


class TooBig(ArithmeticError):
    """A value out of `MOST_BITS`."""


def plain_number(text: str) -> Fraction | None:
    """The number a text of digits, at most one point and one sign is; also `a/b`. None: no such."""
    match = PLAIN.fullmatch(text)
    if match and (match[2] or match[3]):
        if len(text) > MOST_PLAIN_DIGITS:
            raise Unreadable(f"a number of {len(text)} characters")
        whole, part = match[2] or "", match[3] or ""
        value = Fraction(_integer(whole + part), 10 ** len(part))
        return -value if match[1] == "-" else value
    match = FRACTION.fullmatch(text)
    if match and len(text) <= MOST_DIGITS:
        above, below = match[2] or match[4], match[3] or match[5]
        if int(below) == 0:
            raise Unreadable("a division by zero")
        value = Fraction(int(above), int(below))
        return -value if match[1] == "-" else value
    return None


def _integer(digits: str) -> int:
    """`int(digits)` of any length: Python refuses more than some thousand at once."""
    if len(digits) <= 4000:
        return int(digits)
    half = len(digits) // 2
    return _integer(digits[:-half]) * 10**half + _integer(digits[-half:])


def number(value: Fraction) -> sympy.Rational:
    return sympy.Rational(value.numerator, value.denominator)


@lru_cache(maxsize=256)
def expression(text: str) -> sympy.Basic | sympy.MatrixBase:
    """The sympy expression (or matrix) of LaTeX in normal spelling, not evaluated.

    The letter `i` stands for the imaginary unit, `e` is Euler's number. Raises `Unreadable`.
    """
    plain = plain_number(text.strip())
    if plain is not None:
        return number(plain)
    check_size(text)
    try:
        read = latex2sympy(
            spelled_for_parser(text),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
        )
    except RecursionError as error:
        raise Unreadable("nested too deep") from error
    except MACHINE_FAILURES:
        raise
    # The parser raises bare `Exception` for what it does not read, and whatever sympy does.
    except Exception as error:
        raise Unreadable(f"{text[:60]!r} is no expression") from error
    if isinstance(read, sympy.MatrixBase):
        return sympy.ImmutableMatrix(read)
    matrices = isinstance(read, sympy.Basic) and read.has(sympy.MatrixBase, sympy.MatrixExpr)
    if matrices or not isinstance(read, sympy.Expr) or read.has(sympy.nan, sympy.zoo):
        raise Unreadable(f"{text[:60]!r} has no value")
    if read.has(sympy.oo) and read not in (sympy.oo, -sympy.oo):
        raise Unreadable(f"{text[:60]!r} calculates with infinity")
    return read


def check_size(text: str) -> None:
    """Raises `Unreadable` for what the parser would take long for, or evaluate at any size."""
    if len(text) > MOST_CHARACTERS:
        raise Unreadable(f"an expression of {len(text)} characters")
    if re.search(rf"\d{{{MOST_DIGITS}}}", text):
        raise Unreadable(f"more than {MOST_DIGITS} digits in an expression")
    if text.count("|") > MOST_BARS:
        raise Unreadable(f"more than {MOST_BARS} bars")
    if len(CALLED.findall(text)) > MOST_CALLS or re.search(r"[-+]{3}|'{4}", text.replace(" ", "")):
        raise Unreadable("too many functions or signs in a row")
    if "!!" in text or re.search(r"\d'", text):
        raise Unreadable("a double factorial, or a prime behind a number")
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
        if depth < 0:
            raise Unreadable("a bracket closes that was not opened")
    if depth or deepest > DEEPEST:
        raise Unreadable("brackets do not match" if depth else "nested too deep")
    # The parser evaluates these itself.
    binomials = re.findall(r"\\[dt]?binom\{[\w+-]{1,4}\}\{[\w+-]{1,4}\}", text)
    if len(binomials) != text.count("binom"):
        raise Unreadable("a binomial coefficient of that size")
    if re.search(r"\\?(?:gcd|lcm)", text) and re.search(r"[\^!]", text):
        raise Unreadable("a common divisor of powers")
    if re.search(r"(?<![a-zA-Z\\])(?:or|and|not|is|to)(?![a-zA-Z])", text):
        raise Unreadable("words in an expression")
    if re.search(r"\d_", text):
        raise Unreadable("a number with an index")
    if re.search(r"\d\s+\d", text):
        raise Unreadable("two numbers beside each other")


def spelled_for_parser(text: str) -> str:
    r"""As latex2sympy reads it right: it takes capitals for small letters, `2(3)` for a mixed
    number, `x(2)` for a function, and decimals for floating-point numbers."""
    text = re.sub(r"\\[dt]?binom", r"\\binom", text)
    commands: list[str] = []

    def keep(match: re.Match[str]) -> str:
        commands.append(match[0])
        return f"\0{len(commands) - 1}\1"

    text = re.sub(
        r"\\text\s*\{\s*(sin|cos|tan|arcsin|arccos|arctan|ln|log|exp)\s*\}", r"\\\1", text
    )
    text = re.sub(r"\\text\s*\{\s*([A-Za-z])\s*\}", r"\1", text)
    if re.search(r"\\text\s*\{", text):
        raise Unreadable("words in an expression")
    text = re.sub(r"(?<![\d.])(\d*)\.(\d+)", _as_fraction, text)
    text = re.sub(r"(?<![\d^_}])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", _mixed, text)
    text = re.sub(r"([\d)])\s*(?=\(|\\frac)", r"\1\\cdot ", text)
    text = re.sub(r"\\([A-Z][a-z]+)", r"\\text{Q\1}", text)
    text = re.sub(r"(?<!\\)(\\text\{\w+\}|\\(?:begin|end)\{[a-z]*matrix\}|\\[A-Za-z]+)", keep, text)
    text = re.sub(r"([A-Za-z])'+", r"\1_{prime}", text)
    text = re.sub(r"(?<![A-Za-z])([A-Za-z])\s*(?=\()", r"\1\\cdot ", text)
    text = re.sub(r"[A-Z]", lambda m: rf"\text{{Q{m[0]}}}", text)
    return re.sub(r"\x00(\d+)\x01", lambda m: commands[int(m[1])], text)


def _as_fraction(match: re.Match[str]) -> str:
    whole, part = match[1] or "0", match[2]
    return rf"(\frac{{{int(whole + part)}}}{{{10 ** len(part)}}})"


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    sign = "+" if int(above) < int(below) else r"\cdot"
    return rf"({whole}{sign} \frac{{{above}}}{{{below}}})"


def letters(*nodes: sympy.Basic) -> list[sympy.Basic]:
    """What has no value of its own: letters but `i`, and calls such as `f(x)`."""
    found = set().union(*(node.free_symbols | node.atoms(AppliedUndef) for node in nodes))
    return sorted((one for one in found if str(one) != "i"), key=str)


def is_complex(node: sympy.Basic) -> bool:
    return node.has(sympy.I) or any(symbol.name == "i" for symbol in node.free_symbols)


def times(first: sympy.Basic, second: sympy.Basic) -> sympy.Basic:
    """The product, not evaluated: sympy would compute `9^{9^9}`. A matrix times a number is taken
    entry by entry; of two matrices it is not: raises `Unreadable`."""
    if isinstance(second, sympy.MatrixBase):
        first, second = second, first
    if isinstance(first, sympy.MatrixBase):
        if isinstance(second, sympy.MatrixBase):
            raise Unreadable("a matrix times another")
        entries = [sympy.Mul(entry, second, evaluate=False) for entry in first.flat()]
        return sympy.ImmutableMatrix(*first.shape, entries)
    return sympy.Mul(first, second, evaluate=False)


def exact(node: sympy.Basic) -> Fraction | None:
    """The rational value; None where there is none, or it is not made of the four operations,
    whole powers and factorials. Raises `TooBig`."""
    if node.is_Rational:
        return Fraction(int(node.p), int(node.q))
    if isinstance(node, sympy.UnevaluatedExpr):
        return exact(node.args[0])
    if node.is_Add or node.is_Mul:
        total = Fraction(node.is_Mul)
        for arg in node.args:
            value = exact(arg)
            if value is None:
                return None
            total = total + value if node.is_Add else total * value
            _check_bits(_bits(total))
        return total
    if node.is_Pow:
        base, power = exact(node.base), exact(node.exp)
        if base is None or power is None or power.denominator != 1:
            return None
        if base == 0 and power < 0:
            raise Undefined
        if abs(base) == 1 or base == 0:
            return base ** int(power % 2 + 2 * (power != 0))
        _check_bits(_bits(base) * abs(power))
        return base ** int(power)
    if isinstance(node, sympy.factorial):
        value = exact(node.args[0])
        if value is None or value.denominator != 1 or value < 0:
            return None
        if value > MOST_FACTORIAL:
            raise TooBig
        return Fraction(int(sympy.factorial(int(value))))
    return None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _check_bits(bits: float) -> None:
    if bits > MOST_BITS:
        raise TooBig


def evaluate(node: sympy.Basic, point: Point, real: bool) -> mpmath.mpf | mpmath.mpc:
    """The value at a point, at mpmath's working precision. With `real`, even roots and logarithms
    of negative numbers have none, and odd roots are real. Raises `Undefined`, `TooBig`, and
    `Unreadable` for what it does not know."""
    if node.is_Rational:
        return mpmath.mpf(int(node.p)) / int(node.q)
    if node.is_Float:
        return mpmath.mpf(str(node))
    if node in point:
        return point[node]
    if node.is_Symbol and node.name == "i":
        return mpmath.mpc(0, 1)
    if node in CONSTANTS:
        return CONSTANTS[node]()
    name = type(node).__name__
    if name not in CALLS:
        raise Unreadable(f"{name} is not evaluated")
    values = [evaluate(arg, point, real) for arg in node.args]
    try:
        if node.is_Pow:
            odd = node.exp.is_Rational and node.exp.q % 2 == 1
            if real and odd and mpmath.im(values[0]) == 0 and values[0] < 0:
                return (-1) ** int(node.exp.p % 2) * _power(-values[0], values[1], real)
            return _power(values[0], values[1], real)
        if name == "exp":
            return _power(mpmath.e(), values[0], real)
        if name == "log":
            return _log(values, real)
        if name in ("factorial", "binomial"):
            _check_bits(max(abs(value) for value in values) / MOST_FACTORIAL * MOST_BITS)
        else:
            _check_bits(max(mpmath.mag(value) if value else 0 for value in values))
        return mpmath.mpmathify(CALLS[name](*values))
    except (ZeroDivisionError, ValueError, TypeError, OverflowError) as error:
        raise Undefined from error


CONSTANTS: dict[sympy.Basic, Callable[[], mpmath.mpf]] = {
    sympy.pi: lambda: +mpmath.pi,
    sympy.E: lambda: +mpmath.e,
    sympy.I: lambda: mpmath.mpc(0, 1),
    sympy.EulerGamma: lambda: +mpmath.euler,
}


def _power(base, power, real: bool):
    if base == 0:
        if mpmath.re(power) < 0:
            raise Undefined
        return mpmath.mpf(power == 0)
    _check_bits(abs(power) * (abs(mpmath.mag(base)) + 1))
    if real and mpmath.im(base) == 0 and base < 0 and not mpmath.isint(power):
        raise Undefined
    return mpmath.power(base, power)


def _log(values: list, real: bool):
    if any(value == 0 or (real and mpmath.im(value) == 0 and value < 0) for value in values):
        raise Undefined
    base = mpmath.log(values[1]) if len(values) > 1 else 1
    return mpmath.log(values[0]) / base

r"""One way to write mathematics: Unicode signs, LaTeX's looks and plain text's habits made alike.

Nothing here changes a value; what is left is LaTeX without decoration, in ASCII where that exists.
"""

from __future__ import annotations

import re
import unicodedata

from megarl.rewards.answer_text import closing_brace

SIGNS = {
    "−": "-", "–": "-", "—": "-", "﹣": "-", "‐": "-", "‑": "-", "‒": "-",
    "×": r"\times ", "✕": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "∗": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "±": r"\pm ", "∓": r"\mp ",
    "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "ø": r"\emptyset ", "Ø": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "°": r"^\circ ", "∘": r"\circ ",
    "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "∧": r"\land ", "∨": r"\lor ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "∠": r"\angle ", "∖": r"\setminus ", "∣": "|",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∶": ":", "：": ":",
    "…": r"\ldots ", "€": r"\text{euro}", "£": r"\text{pound}", "¥": r"\text{yen}",
    "、": ",", "，": ",", "。": ".",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu",
    "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "ς": "sigma", "τ": "tau", "υ": "upsilon",
    "φ": "phi", "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta",
    "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi",
    "Ω": "Omega",
}  # fmt: skip
ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
TABLE = str.maketrans(SIGNS | {sign: f"\\{name} " for sign, name in GREEK.items()})
RAISED = re.compile(r"[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+")
LOWERED = re.compile(r"[₀-₉₊₋]+")

ALIASES = [
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|[bB]ig+[lrm]?)(?![a-zA-Z])\s*\.?"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|nolimits|boldsymbol|mathbf|mathit|bm|"
                r"hphantom|phantom|tiny|small|large|Large|bf|rm|it)(?![a-zA-Z])\s*"), ""),
    (re.compile(r"\\(?:mathrm|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|mathsf|"
                r"mathtt|operatorname\*?|emph|underline)\s*\{"), r"\\text{"),
    (re.compile(r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])"), r"\\le"),
    (re.compile(r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])"), r"\\ge"),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\(?:cdotp|ast)(?![a-zA-Z])"), r"\\cdot"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:l|r)?vert(?![a-zA-Z])|\\mid(?![a-zA-Z])"), "|"),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\l(?:brack|parenthesis)(?![a-zA-Z])"), "["),
    (re.compile(r"\\rbrack(?![a-zA-Z])"), "]"),
    (re.compile(r"\\colon(?![a-zA-Z])"), ":"),
    (re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:dots|cdots|dotsc|dotsb)(?![a-zA-Z])"), r"\\ldots"),
    (re.compile(r"\\(?:degree|textdegree)(?![a-zA-Z])"), r"^\\circ"),
    (re.compile(r"\^\s*\{\s*\\circ\s*\}"), r"^\\circ"),
    (re.compile(r"\\(?:vee)(?![a-zA-Z])"), r"\\lor"),
    (re.compile(r"\\(?:wedge)(?![a-zA-Z])"), r"\\land"),
    (re.compile(r"\\(?:Reals|R)(?![a-zA-Z])|\\mathbb\s*R(?![a-zA-Z])"), r"\\mathbb{R}"),
    (re.compile(r"\\(?:imath|text\{i\})(?![a-zA-Z])"), "i"),
    (re.compile(r"\\(?:text\{e\})"), "e"),
    (re.compile(r"\\(?:quad|qquad|enspace|thinspace|hspace\{[^{}]*\})(?![a-zA-Z])"), " "),
    (re.compile(r"\\!|\\/|\\negthinspace(?![a-zA-Z])"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), ","),
    (re.compile(r"\\\\(?=\s*$)"), ""),
    (re.compile(r"(?<!\\)~"), " "),
    (re.compile(r"(?<!\\)\\[,;:> ]"), " "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\[#&_]"), lambda found: found[0][1]),
]  # fmt: skip
PLAIN = [
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r"\\cdot "),
    (re.compile(r"(?<![\\a-zA-Z])sqrt(?=\s*[({\d])"), r"\\sqrt"),
    (re.compile(r"(?<![\\a-zA-Z])(pi|infty|theta|alpha|beta|lambda)(?![a-zA-Z])"), r"\\\1 "),
    (re.compile(r"(?<![\\a-zA-Z])(?:inf|infinity|oo)(?![a-zA-Z])", re.I), r"\\infty "),
    (re.compile(r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|sinh|"
                r"cosh|tanh|max|min|gcd)(?=[\s({^_\\\d])"), r"\\\1"),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!=(?!=)"), r"\\ne "),
    (re.compile(r"\+/-|\+-"), r"\\pm "),
]  # fmt: skip
REPEATING = re.compile(
    r"(?<!\d)(\d{0,40})\.(\d{0,40})(?:\\(?:overline|bar|dot)\s*\{(\d{1,40})\}|\((\d{1,40})\))"
)
MIXED = re.compile(r"(?<![\d/.,^{] )(?<![\d/.,^{])\b(\d+) (\d+)\s?/\s?(\d+)(?![\d/.]| ?/)")
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,9})(?![\w.])")
OVERLINED = re.compile(r"(?:\d[\u0304\u0305])+")
WRAPPERS = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")]


def normal(text: str) -> str:
    r"""`text` in one spelling. LaTeX without size and space commands, text commands as `\text`."""
    text = _unicode(text)
    text = _unwrapped(text.strip())
    for expression, plain in ALIASES:
        text = expression.sub(plain, text)
    for expression, plain in PLAIN:
        text = expression.sub(plain, text)
    text = _arguments(_math_signs(text))
    text = re.sub(r"\^\s*(-?\d+)", r"^{\1}", text)
    text = re.sub(r"\^\s*\(([^()]{1,40})\)", r"^{\1}", text)
    text = SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"_\s*(\d+)", r"_{\1}", text)
    text = REPEATING.sub(_repeating, text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"(?:[\s.,;:]|(?<=[a-z]{3})!)+$", "", text)


def plain_words(text: str) -> str:
    """`text` (in normal spelling) as bare words: for answers that are words, and first looks."""
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    words = words.replace("$", " ").replace('"', " ")
    words = re.sub(r"\s+", " ", words).strip(" .,;:!")
    single = re.fullmatch(r"[(\[]\s*([A-Za-z])\s*[)\]]", words)
    if single:
        return single[1]
    return words if len(words) == 1 else words.casefold()


def _repeating(match: re.Match[str]) -> str:
    """`0.1\\overline{6}` as the fraction it is."""
    whole, part, block = match[1], match[2], match[3] or match[4]
    below = 10 ** len(part) * (10 ** len(block) - 1)
    above = int((whole + part) or 0) * (10 ** len(block) - 1) + int(block)
    return f"\\frac{{{above}}}{{{below}}}"


def _unicode(text: str) -> str:
    text = unicodedata.normalize("NFC", text)
    text = OVERLINED.sub(lambda m: "\\overline{" + re.sub(r"\D", "", m[0]) + "}", text)
    text = RAISED.sub(
        lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).translate(TABLE) + "}", text
    )
    text = LOWERED.sub(
        lambda m: "_{" + unicodedata.normalize("NFKC", m[0]).translate(TABLE) + "}", text
    )
    out = []
    for char in text:
        if char.isascii():
            out.append(char)
        elif char in ROOTS:
            out.append(ROOTS[char])
        elif ord(char) in TABLE:
            out.append(char)
        elif unicodedata.category(char) == "Nd":
            out.append(str(unicodedata.digit(char)))
        elif unicodedata.category(char) == "No" and "FRACTION" in unicodedata.name(char, ""):
            out.append(_fraction(char))
        elif unicodedata.category(char) == "Cf":
            continue
        elif unicodedata.category(char) == "Zs":
            out.append(" ")
        else:
            out.append(unicodedata.normalize("NFKC", char))
    return "".join(out).translate(TABLE)


def _fraction(char: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", char).partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}" if below else char


def _unwrapped(text: str) -> str:
    """Without the signs around the whole of it that say: this is mathematics, or bold."""
    changed = True
    while changed:
        changed = False
        for opening, closing in WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if (
                len(text) > len(opening) + len(closing)
                and text.startswith(opening)
                and text.endswith(closing)
                and not text.endswith("\\" + closing)
                and opening not in inner
                and closing not in inner
            ):
                text, changed = inner.strip(), True
        if text[:-1].endswith("$") and text[-1:] in ".,;":
            text, changed = text[:-1], True
    return text


def _math_signs(text: str) -> str:
    """Without `$…$` around parts; a dollar sign that opens nothing is money."""
    text = text.replace(r"\$", r"\text{dollar}")
    text = re.sub(r"\\[()\[\]]", " ", text)
    if text.count("$") % 2 == 0:
        return text.replace("$", " ")
    return text.replace("$", r"\text{dollar}", 1).replace("$", " ")


def _arguments(text: str) -> str:
    r"""Braces around arguments that stand without: `\frac12`, `\sqrt2`, `\sqrt(2)`, `x^10`."""
    text = re.sub(r"\\sqrt\s*(\[[^\[\]{}]*\])?\s*(\d+|[a-zA-Z](?![a-zA-Z]))", r"\\sqrt\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]{}]*\])?\s*(\\pi)", r"\\sqrt\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]{}]*\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}", text)
    text = re.sub(r"\}\s+\{", "}{", text)
    return _fractions(text)


def _fractions(text: str) -> str:
    r"""`\frac` with both arguments in braces; one argument is a group, a command or a character."""
    done, rest = [], text
    while True:
        before, found, rest = rest.partition(r"\frac")
        done.append(before)
        if not found:
            return "".join(done)
        done.append(found)
        above, after = _argument(rest)
        below, behind = _argument(after)
        if above and below:
            done.append("{")
            rest = above + "}{" + below + "}" + behind


def _argument(text: str) -> tuple[str, str]:
    """The first argument without its braces, and what follows it."""
    text = text.lstrip()
    if text.startswith("{"):
        close = closing_brace(text, 1)
        return (text[1:close], text[close + 1 :]) if close > 0 else ("", text)
    match = re.match(r"\\[a-zA-Z]+(?:\{[^{}]*\})*|[\da-zA-Z]", text)
    return (match[0], text[match.end() :]) if match else ("", text)

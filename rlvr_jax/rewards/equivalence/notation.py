r"""The many spellings of one notation: Unicode, plain text and typography brought to the LaTeX that ``grammar`` reads.

Only spelling changes here; nothing is dropped that could carry meaning, and what is broken stays broken.
"""

from __future__ import annotations

import re
import unicodedata

_GREEK = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
})  # fmt: skip
_SYMBOLS = {
    "−": "-", "‐": "-", "‑": "-", "‒": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ",
    "*": r"\cdot ", "÷": r"\div ", "∕": "/", "⁄": "/", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "≤": r"\le ",
    "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "°": r"^\circ ", "º": r"^\circ ", "…": r"\ldots ", "⋯": r"\ldots ", "′": "'", "’": "'", "∖": r"\setminus ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "∠": r"\angle ", "△": r"\triangle ", "∫": r"\int ", "∑": r"\sum ", "∏": r"\prod ", "µ": r"\mu ", "ϕ": r"\phi ",
    "“": '"', "”": '"', "‘": "'", "﹣": "-", "≡": r"\equiv ",
}  # fmt: skip
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣ", "0123456789+-()nix", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙₖₓ", "0123456789nkx", strict=True))
_SUPER_RUN = re.compile(f"[{''.join(_SUPER)}]+")
_SUB_RUN = re.compile(f"[{''.join(_SUB)}]+")

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\+%", r"\\%"),
        (r"(?<![a-zA-Z\\])m\s*(?=\\angle)", ""),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
        (r"\*\*", "^"),
        # A unit with a power inside its group: \mathrm{m/s^2} as \text{m/s}^2.
        (
            r"\\(?:text|mathrm)\s*\{\s*([A-Za-z/. ]*[A-Za-z])\$?\^\{?(-?\d)\}?\$?\s*\}",
            r"\\text{\1}^{\2}",
        ),
        (r"(?<=\d) ?([A-Za-z]{1,3}/[A-Za-z]{1,3})\^\{?(\d)\}?$", r"\\text{ \1}^{\2}"),  # 9.8 m/s^2
        (r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-zA-Z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\(?:nicefrac|sfrac|flatfrac)(?![a-zA-Z])", r"\\frac"),
        (r"(\d+\.\d*)\((\d+)\)(?![\w(])", r"\1\\overline{\2}"),  # 0.1(6)
        (r"(?<=\d)['_](?=\d{3}(?!\d))", "{,}"),
        (r"\\mathbb\s*([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}"),
        (r"(\\mathbb\{[A-Z]\})\s*-\s*(?=\\\{)", r"\1\\setminus "),
        (r"\(\s*mod\s+(\d+)\s*\)", r"\\pmod{\1}"),
        (r"\+/-|\+-(?=\s*[\d\\(a-z])", r"\\pm "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|=/=", r"\\ne "),
        (r"\.\.\.+", r"\\ldots "),
        (r"√\s*(?=\()", "sqrt"),
        (r"√\s*(\d+(?:\.\d+)?|[a-zA-Z]|\\pi)", r"\\sqrt{\1}"),
        (r"∛\s*(\d+|[a-zA-Z])", r"\\sqrt[3]{\1}"),
        (r"\\(?:left|right)\s*\.", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])", ""),
        (
            r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|allowbreak|therefore|bf|tiny|small"
            r"|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])|\\(?:color|textcolor)\s*\{\w+\}|\\hspace\s*\{[^{}]*\}"
            r"|\\(?:underline|ensuremath)(?=\s*\{)",
            " ",
        ),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\l?vert(?![a-zA-Z])|\\rvert(?![a-zA-Z])", "|"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\colon(?![a-zA-Z])", ":"),
    )
)
# Wrappers of the whole answer: math delimiters, bold, and a full stop or a comma after it.
_DELIMITERS = (
    ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"),
    ("`", "`"), ('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"),
)  # fmt: skip
_LEAD_IN = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is|\s*[:=])|(?:option|choice)(?=\s+[A-J]\b))"
    r"[\s:]*",
    re.IGNORECASE,
)
_INVISIBLE = dict.fromkeys(
    map(
        ord,
        "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2066\u2067\u2068\u2069\ufeff",
    )
)  # not the overrides, which show 12 as 21
_BOX = re.compile(r"\\(?:boxed|fbox)(?=\s*\{)")
_DOLLAR = re.compile(r"(?<!\\)\$")
_TEXT_NUMBER = re.compile(
    r"^\\(?:text|textbf|textit|textrm|mbox|mathrm)\s*\{([^{}\\]*\d[^{}\\]*)\}$"
)
_TRAILING = re.compile(r"(?:[\s.,;:]|\\\\|\\$|~|\\[,;:! ]|\\q?quad(?![a-zA-Z]))+$")


def tidy(text: str) -> str:
    """Returns the answer without wrappers, in LaTeX spelling. Linear in its length."""
    text = strip_wrappers(text.translate(_INVISIBLE))
    if (lead := _LEAD_IN.match(text)) and text[lead.end() :].strip():
        text = strip_wrappers(text[lead.end() :])
    if not text.isascii():
        text = _SUPER_RUN.sub(lambda m: "^{" + "".join(_SUPER[c] for c in m[0]) + "}", text)
        text = _SUB_RUN.sub(lambda m: "_{" + "".join(_SUB[c] for c in m[0]) + "}", text)
        text = "".join(map(_plain, text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if len(dollars := _DOLLAR.findall(text)) > 1 and len(dollars) % 2 == 0:  # math inside text
        text = _DOLLAR.sub(" ", text)
    text = _TEXT_NUMBER.sub(r"\1", text)
    text = _BOX.sub("", text)  # a box within the answer: its braces stay, as a group
    return text.replace("*", r"\cdot ").strip()


def strip_wrappers(text: str) -> str:
    """Removes white space, math delimiters and final punctuation around the answer."""
    text = text.strip()
    for _ in range(4):
        before = text
        text = _final_punctuation(text)
        for opening, closing in _DELIMITERS:
            inner = text[len(opening) : len(text) - len(closing)]
            if (
                len(text) > len(opening + closing)
                and text.startswith(opening)
                and text.endswith(closing)
            ):
                if opening not in inner and closing not in inner and not inner.endswith("\\"):
                    text = inner.strip()
                break
        if text == before:
            break
    return text


def _final_punctuation(text: str) -> str:
    match = _TRAILING.search(text[-64:])
    if match is None:
        return text
    stripped = text[: len(text) - len(match.group())]
    if stripped.endswith("\\") or match.group().strip().startswith("..") or not stripped:
        return text  # "\," cut in two, or an ellipsis
    return stripped


def _plain(character: str) -> str:
    if character.isascii():
        return character
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if "\U0001d400" <= character <= "\U0001d7ff":  # letters of mathematical alphabets
        return _plain(unicodedata.normalize("NFKC", character))
    if category == "Zs":
        return " "
    if category == "No":
        top, slash, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}" if slash else character
    if "\uff01" <= character <= "\uff5e":  # full-width ASCII
        return chr(ord(character) - 0xFEE0)
    if "\u0391" <= character <= "\u03c9":
        name = unicodedata.name(character, "").split()
        if len(name) == 4 and name[0] == "GREEK":
            letter = name[3].lower().replace("lamda", "lambda")
            letter = letter.capitalize() if name[1] == "CAPITAL" else letter
            if letter in _GREEK:
                return f"\\{letter} "
    return character

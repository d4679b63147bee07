r"""Exact numbers in LaTeX: what stands in an answer as digits, fractions, powers, units and bases.

Nothing here is evaluated as Python, and no number grows beyond MOST_BITS.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MOST_BITS = 10_000  # bits of the largest numerator or denominator
ROUNDING = Fraction(2, 10**6)  # relative; of a decimal that stands for a fraction without an end

_FULL_WIDTH = {0xFF01 + i: 0x21 + i for i in range(94)} | {0x3000: " "}
_SIGNS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ",
    "\u00f7": r"\div ", "\u00b0": r"^\circ ", "\u03c0": r"\pi ", "\u221e": r"\infty ",
    "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}",
    "\u00be": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2264": r"\le ",
    "\u2265": r"\ge ", "\u221a": r"\sqrt ", "\u222a": r"\cup ",
})  # fmt: skip
_NOTHING = re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\limits|\\bf(?![a-z])")
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|\\thinspace|\s+")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-z])")
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,| )\d{3})+(?!\d|[, ]\d)")
_TEXT = r"\\(?:text|mathrm|textrm|textbf|textit|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
_UNIT = re.compile(
    rf"(?:(?<=[\w)}}.%])\s*{_TEXT}|(?<=[\d)}}])\s+(?!pi\b)([A-Za-z]{{2,}}(?:[ /][A-Za-z]+)*))"
    r"\s*(?:\^\s*\{?([23])\}?)?\s*\.?$"
)
_DEGREE = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![a-z])")
_BASE = re.compile(r"^([0-9A-Za-z.]+)\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*)?(?:base\s*)?(\d+)[\s}]*$")
_EXPONENT = re.compile(r"(?<![A-Za-z\d])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])")

# Each unit has its names; the first stands for all.
_UNITS = [
    "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre",
    "km kilometer kilometre",
    "ft foot feet", "in inch inche", "mi mile", "yd yard", "g gram", "kg kilogram", "mg milligram",
    "lb pound", "oz ounce", "s sec second", "min minute", "h hr hour", "l liter litre",
    "ml milliliter millilitre", "degree deg", "dollar usd", "cent", "percent", "mph", "unit",
]  # fmt: skip
_NAMES = {name: names.split()[0] for names in _UNITS for name in names.split()}
_POWERS = {"square": "2", "sq": "2", "cubic": "3"}


def cleaned(text: str) -> str:
    """The text with plain signs, without LaTeX that only sets spaces, and without thousands marks.

    Scientific notation becomes a product with a power of ten.
    """
    text = text.translate(_FULL_WIDTH).translate(_SIGNS).replace("{,}", ",")
    text = text.replace(r"\$", "").replace("$", "").replace(r"\(", "").replace(r"\)", "")
    text = _FRACTION.sub(r"\\frac", _NOTHING.sub("", text))
    text = _SPACE.sub(" ", text).strip()
    if inner := re.fullmatch(_TEXT, text):
        text = inner[1].strip()
    if not re.search(r"[(\[]|\\\{", text):  # there, a comma separates
        text = _GROUPS.sub(lambda match: re.sub("[, ]", "", match[0]), text)
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    return re.sub(r"(?<=[\w})])\s*\.$", "", text)


def split_unit(text: str) -> tuple[str, str]:
    """A cleaned text without its unit, and the unit under one name for all its names."""
    if degree := _DEGREE.search(text):
        unit = _unit_name(re.sub(r"\\[a-z]+", " ", text[degree.end() :]), "")
        return text[: degree.start()].strip(), ("degree " + unit).strip()
    match = _UNIT.search(text)
    if match is None:
        return text, ""
    return text[: match.start()].strip(), _unit_name(match[1] or match[2] or "", match[3] or "")


def _unit_name(text: str, power: str) -> str:
    words = re.findall(r"[a-z]+|[23](?=\b|$)", text.lower().replace("^", " "))
    names: list[str] = []
    for word in words:
        if word in _POWERS:
            power = _POWERS[word]
        elif word in ("2", "3"):
            power = word
        else:
            single = word[:-1] if word.endswith("s") and len(word) > 2 else word
            names.append(_NAMES.get(word) or _NAMES.get(single) or single)
    name = " ".join(names)
    return {"mi per h": "mph"}.get(name, name) + power


def split_base(text: str) -> tuple[str, str]:
    """The digits and the base of a cleaned number such as 101_2; no base for any other text."""
    match = _BASE.match(text)
    if match is None or not re.search(r"\d", match[1]):
        return text, ""
    return match[1].upper(), match[2]


@dataclass(frozen=True)
class Number:
    """A rational number, and the form in which it was written."""

    value: Fraction
    is_decimal: bool = False  # written with a point
    is_percent: bool = False  # `value` is then before the division by 100

    def equals(self, other: "Number") -> bool:
        """Exactly, or up to rounding where a decimal stands for a fraction that has no end.

        A percentage equals its fraction, and also the number before its sign.
        """
        if self.is_percent != other.is_percent:
            percent, plain = (self, other) if self.is_percent else (other, self)
            hundredth = Number(percent.value / 100, percent.is_decimal)
            return hundredth.equals(plain) or Number(percent.value, percent.is_decimal).equals(
                plain
            )
        if self.value == other.value:
            return True
        if self.is_decimal == other.is_decimal:
            return False
        decimal, fraction = (self, other) if self.is_decimal else (other, self)
        if _has_end(fraction.value):
            return False
        return abs(decimal.value - fraction.value) <= ROUNDING * abs(fraction.value)

    @property
    def text(self) -> str:
        """The same text for equal numbers."""
        return str(self.value / 100 if self.is_percent else self.value)


def _has_end(value: Fraction) -> bool:
    """True for a fraction that decimals can write: its denominator has no factor but 2 and 5."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def read_number(text: str) -> Number | None:
    """The number that a cleaned text without a unit writes; None for anything else."""
    percent = re.search(r"\s*\\?%$", text)
    body = text[: percent.start()] if percent else text
    if len(body) > 500 or not re.search(r"\d", body):
        return None
    try:
        value = _Reader(body).whole()
    except (_NoNumberError, ZeroDivisionError, RecursionError):
        return None
    return Number(value, is_decimal="." in body, is_percent=percent is not None)


class _NoNumberError(Exception):
    """The text holds something else than an exact number."""


_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(\\[a-z]+)|(.))", re.DOTALL)
_TIMES = ("*", r"\cdot", r"\times")
_OVER = ("/", r"\div")
_CLOSING = {"(": ")", "{": "}", "[": "]"}


class _Reader:
    """Sums, products, fractions and powers, by recursive descent."""

    def __init__(self, text: str) -> None:
        self._tokens = [match[0].strip() for match in _TOKEN.finditer(text.strip())]
        self._place = 0

    def whole(self) -> Fraction:
        """The value of all of the text."""
        value = self._sum()
        if self._next():
            raise _NoNumberError
        return value

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._place += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self._product())
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            token = self._next()
            if token in _TIMES:
                self._take()
                value = _bounded(value * self._signed())
            elif token in _OVER:
                self._take()
                value = _bounded(value / self._signed())
            elif token in ("(", r"\frac"):
                value = _bounded(value * self._power())
            else:
                return value

    def _signed(self) -> Fraction:
        if self._next() in ("+", "-"):
            return self._signed() if self._take() == "+" else -self._signed()
        return self._power()

    def _power(self) -> Fraction:
        is_whole = self._next().isdecimal()
        base = self._atom()
        if is_whole and self._next() == r"\frac":  # a mixed number
            return base + self._atom()
        if self._next() != "^":
            return base
        self._take()
        exponent = self._argument() if self._next() == "{" else self._signed()
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or abs(exponent) * size > MOST_BITS:
            raise _NoNumberError
        return base ** int(exponent)

    def _atom(self) -> Fraction:
        token = self._take()
        if token in _CLOSING:
            value = self._sum()
            if self._take() != _CLOSING[token]:
                raise _NoNumberError
            return value
        if token == r"\frac":
            return self._argument() / self._argument()
        if not re.fullmatch(r"\d+\.?\d*|\.\d+", token) or len(token) > MOST_BITS // 4:
            raise _NoNumberError
        return Fraction(token.rstrip("."))

    def _argument(self) -> Fraction:
        """The argument of a LaTeX command: braces, or one digit."""
        token = self._next()
        if token == "{":
            return self._atom()
        if not token[:1].isdecimal() or "." in token:
            raise _NoNumberError
        self._tokens[self._place] = token[1:]
        if not token[1:]:
            self._place += 1
        return Fraction(token[0])


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise _NoNumberError
    return value

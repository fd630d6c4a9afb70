r"""Separates a mathematical answer from its unit (`15\text{ cm}^2`, `\$15`, `3:45 pm`), and compares units."""

from __future__ import annotations

import re

# Each string has all names of one unit, separated by spaces, without the plural s.
_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "dm decimeter decimetre", "m meter metre",
        "km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram gm",
        "kg kilogram", "ton tonne", "lb pound", "oz ounce", "ms millisecond", "s sec second", "min minute",
        "h hr hour", "day", "week", "month", "yr year", "L l liter litre", "mL ml milliliter millilitre", "gal gallon",
        "N newton", "J joule", "kJ kilojoule", "W watt", "kW kilowatt", "V volt", "A amp ampere", "Hz hertz",
        "K kelvin", "Pa pascal", "mol mole", "eV", "rad radian", "deg degree", "degC", "degF", "mph", "acre",
        "hectare ha", "dollar usd", "cent", "euro", "rupee", "yen", "yuan", "am a.m. a.m", "pm p.m. p.m", "percent",
        "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
        "December", "red", "blue", "green", "north", "south", "east", "west", "left", "right", "positive", "negative",
    )
    for name in names.split()
}  # fmt: skip
_SEPARATOR = r"(?:\\[,;:! ]|~|\s|/|\\cdot(?![a-z])|-)"
_TEXT = r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|rm|operatorname)\s*\{[^{}]*\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
_IN_TEXT = re.compile(rf"((?:{_SEPARATOR}*{_TEXT}{_POWER})+)\s*$")
_PLAIN = re.compile(rf"(?<=[\d}}])(\s*(?:\\[,;:! ]|~)?\s*[a-zA-Z][a-zA-Z. ]*{_POWER}(?:\s*/\s*[a-zA-Z]+{_POWER})*)\s*$")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_CURRENCY = {"\\$": "dollar", "€": "euro", "£": "poundsterling", "¥": "yen", "₹": "rupee"}
_MONEY = re.compile(rf"^\s*-?({'|'.join(map(re.escape, _CURRENCY))})|({'|'.join(map(re.escape, _CURRENCY))})\s*$")
_ENDS_OPEN = re.compile(r"(?:[-=+^_(,<>|*/&:;]|\\[a-zA-Z]+)\s*$")


def split_unit(text: str, *, letters: bool = False) -> tuple[str, str]:
    r"""Splits an answer into (value, unit): `9.8 \text{ m}/\text{s}^2` into `9.8` and `m/s^2`.

    The unit is "" if the answer has no unit. A single letter without \text may be a variable. A single letter is only
    parsed as a unit if `letters` is True and there is a space before the letter.
    """
    money = _MONEY.search(text)
    if money:
        return text[: money.start()] + money[0].replace(money[1] or money[2], "") + text[money.end() :], _CURRENCY[
            money[1] or money[2]
        ]
    match = _IN_TEXT.search(text)
    if match and (value := text[: match.start()].strip()) and not _ENDS_OPEN.search(value.removesuffix("\\pi")):
        return value, _name(match[1])
    match = _PLAIN.search(text)
    if match and not _VARIABLE.search(value := text[: match.start()].strip()):
        unit = _name(match[1])
        words = re.findall(r"[a-zA-Z.]+", unit)
        spaced = match[1][0] in " \\~"
        if len(unit) == 1:
            is_known = letters and spaced and value[-1].isdigit() and unit in _UNITS
        else:
            is_known = _spelled(unit) is not None or (spaced and all(len(word) > 3 or _spelled(word) for word in words))
        if is_known:
            return value, unit
    return text, ""


def clash(gold_unit: str, answer_unit: str) -> bool:
    """Returns whether two units of measurement are both known and different."""
    first, second = _spelled(gold_unit), _spelled(answer_unit)
    return first is not None and second is not None and first != second


def is_unit(word: str) -> bool:
    """Returns whether a word is a known unit of measurement."""
    return _spelled(word) is not None


def _name(unit: str) -> str:
    """Returns a unit of measurement without LaTeX commands: `m/s^2` for `\\text{ m}/\\text{s}^{2}`."""
    unit = re.sub(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox|rm|operatorname)\s*\{([^{}]*)\}", r"\1", unit)
    return re.sub(r"\s*([/^])\s*", r"\1", re.sub(r"\\cdot|\\[,;:! ]|[~{}]", " ", unit)).strip()


def _spelled(unit: str) -> str | None:
    """Returns a unit of measurement in normal form (`m ^ 2` for `square meters`); None if a part of the unit is not
    known."""
    unit = re.sub(r"\b(?:sq\.?|square)\s+([A-Za-z]+)", r"\1^2", re.sub(r"\bper\b", "/", unit))
    unit = re.sub(r"\bcubic\s+([A-Za-z]+)", r"\1^3", unit)
    words = []
    for word in re.findall(r"[A-Za-z.]+|[/^]|-?\d+", unit):
        if word[0].isalpha():
            lower = word.lower()
            forms = (word, word.removesuffix("s"), lower, lower.removesuffix("s"), lower.capitalize())
            word = next((_UNITS[form] for form in forms if form in _UNITS), "")
            if not word:
                return None
        words.append(word)
    return " ".join(words) or None

"""Articles and plurals of English words, so that "a dog", "dogs" and "dog" count as one name.

Of a name with several words the last one is changed. A form that is no English word does no harm,
since no caption has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

# ends of words that also occur in compounds, e.g. grandchild and snowman
_IRREGULAR = {
    "man": "men",
    "child": "children",
    "person": "people",
    "mouse": "mice",
    "goose": "geese",
    "foot": "feet",
    "tooth": "teeth",
    "ox": "oxen",
    "cactus": "cacti",
    "fungus": "fungi",
    "octopus": "octopi",
    "hippopotamus": "hippopotami",
}
_F, _FE = "leaf loaf sheaf thief wolf calf half elf scarf wharf dwarf hoof", "knife life wife"
_VES = tuple(f"{_F} {_FE}".split())  # ends of words with a plural in ves
_NO_PLURAL = ("ss", "us", "is", "news", "lens", "gas")  # ends of words in s that are singular
_SHORTEST = 4  # letters of a plural
_ARTICLE = re.compile(r"(?:an?|the)\s+(?=\S)", re.IGNORECASE)


def without_article(text: str) -> str:
    """Return the text without a leading a, an or the.

    Example:
        >>> without_article("the church")
        'church'
    """
    return _ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text


def plurals(text: str) -> list[str]:
    """Return the plurals of a name that are not formed with s or es, in lower case.

    Example:
        >>> plurals("wild goose")
        ['wild geese']
    """
    return _of_last_word(text.casefold(), _plurals)


def singulars(text: str) -> list[str]:
    """Return what a name may be the plural of. It keeps the capitals of the text's beginning.

    Example:
        >>> singulars("Butterflies")
        ['Butterfly', 'Butterflie']
    """
    return _of_last_word(text, _singulars)


def spellings(text: str) -> list[str]:
    """Return a name, without its article, and its singulars, the likelier ones first."""
    names = list(dict.fromkeys([text, without_article(text)]))
    return list(dict.fromkeys([*names, *(one for name in names for one in singulars(name))]))


def _of_last_word(text: str, forms: Callable[[str], list[str]]) -> list[str]:
    match = re.search(r"\w+$", text)
    if match is None:
        return []
    return [text[: match.start()] + form for form in forms(match.group())]


def _plurals(word: str) -> list[str]:
    found = [
        word.removesuffix(one) + many for one, many in _IRREGULAR.items() if word.endswith(one)
    ]
    if re.search(r"[^aeiou\W]y$", word):
        found.append(f"{word[:-1]}ies")
    if word.endswith(_VES):
        found.append(re.sub(r"fe?$", "ves", word))
    return found


def _singulars(word: str) -> list[str]:
    lower = word.casefold()
    found = [
        word[: len(word) - len(many)] + one
        for one, many in _IRREGULAR.items()
        if lower.endswith(many)
    ]
    if len(word) < _SHORTEST or not lower.endswith("s") or lower.endswith(_NO_PLURAL):
        return found
    if lower.endswith("ies"):
        found.append(f"{word[:-3]}y")
    if lower.endswith("ves"):
        found += [word[:-3] + end for end in ("f", "fe") if (lower[:-3] + end).endswith(_VES)]
    if lower.endswith(("ses", "xes", "zes", "ches", "shes", "oes")):
        found.append(word[:-2])
    return [*found, word[:-1]]

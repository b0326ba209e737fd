"""Articles and plurals, and which texts mention a word."""

from __future__ import annotations

import pytest

from concept_eraser.data import inflection, prompts

PAIRS = (
    ("goose", "geese"),
    ("butterfly", "butterflies"),
    ("wild strawberry", "wild strawberries"),
    ("leaf", "leaves"),
    ("bookshelf", "bookshelves"),
    ("knife", "knives"),
    ("housewife", "housewives"),
    ("child", "children"),
    ("snowman", "snowmen"),
    ("woman", "women"),
    ("mouse", "mice"),
    ("foot", "feet"),
    ("tooth", "teeth"),
    ("person", "people"),
    ("bus", "buses"),
    ("church", "churches"),
    ("toy", "toys"),
    ("giraffe", "giraffes"),
    ("movie", "movies"),
    ("horse", "horses"),
)


@pytest.mark.parametrize(("singular", "plural"), PAIRS)
def test_a_singular_and_its_plural_are_one_word(singular: str, plural: str) -> None:
    assert prompts.mentions(f"Two {plural.title()}, far away", [singular])
    assert prompts.mentions(f"a {singular} far away", [plural])
    assert singular in inflection.spellings(f"the {plural}")


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("bus", "a bu"),
        ("glass", "a glas"),
        ("news", "a new car"),
        ("café", "two caves"),
        ("toy", "two toies"),
        ("chess", "a ches"),
    ],
)
def test_other_words_are_not_mentioned(word: str, text: str) -> None:
    assert not prompts.mentions(text, [word])


def test_articles() -> None:
    for text in ("a dog", "The dog", "an  dog"):
        assert inflection.without_article(text) == "dog"
    for text in ("anteater", "theatre", "a", "the", "A-ha"):
        assert inflection.without_article(text) == text


def test_the_name_itself_is_the_first_spelling() -> None:
    assert inflection.spellings("the dogs") == ["the dogs", "dogs", "the dog", "dog"]
    assert inflection.spellings("C++") == ["C++"]

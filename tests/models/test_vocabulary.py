"""The vocabulary for attacks: the positions of free tokens, and which tokens survive as text."""

from __future__ import annotations

import copy

import pytest
import torch

from concept_eraser.models.base import Condition
from concept_eraser.models.vocabulary import Words
from concept_eraser.utils.errors import UserError

PROMPT = "a red star on a white background"


@pytest.mark.parametrize(
    ("where", "expected"),
    [("prefix", [1, 2, 3]), ("suffix", [8, 9, 10]), ("middle", [4, 5, 6]), ("insert", [3, 6, 8])],
)
def test_free_tokens_go_to_their_positions(where, expected: list[int], shared_tiny) -> None:
    """Seven tokens of the prompt; positions count from the start token at 0."""
    words = shared_tiny.words
    assert len(words.ids(PROMPT)) == 7
    slots = words.slots([PROMPT], 3, where)
    assert slots.places.tolist() == [expected]
    rest = [i for i in range(1, 11) if i not in expected]
    assert slots.ids[0, rest].tolist() == words.ids(PROMPT)
    assert slots.ids.shape == (1, words.length)
    tokens = slots.fill(torch.tensor([[320, 320, 320]]))
    assert tokens[0, expected].tolist() == [320, 320, 320]


def test_free_tokens_first_and_after_every_third_token_and_in_place_of_a_word(shared_tiny) -> None:
    """P4D's code: int(n / k) + 1 places, the multiples of k + 1 behind the start token."""
    words = shared_tiny.words
    assert words.free_token_every(PROMPT, 3).places.tolist() == [[1, 5, 9]]
    assert words.free_token_every("a star", 3).places.tolist() == [[1]]
    for n in range(1, 10):
        for spacing in (1, 2, 3, 4):
            slots = words.free_token_every("star " * n, spacing)
            count = int(n / spacing) + 1
            published = [i + 1 for i in range(n + count) if i % (spacing + 1) == 0]
            assert slots.places.tolist() == [published]
            assert len(published) == count
            own = [i for i in range(1, n + count + 1) if i not in published]
            assert slots.ids[0, own].tolist() == words.ids("star " * n)
    slots = words.in_place_of([PROMPT, "a star"], "star")
    assert slots.places.tolist() == [[3], [2]]
    with pytest.raises(UserError, match="replaces the word 'moon', which the prompt 'a red star"):
        words.in_place_of([PROMPT], "moon")


def test_prompts_that_leave_no_room_are_refused(shared_tiny) -> None:
    with pytest.raises(UserError, match="3 tokens longer than the model's 77"):
        shared_tiny.words.slots(["star " * 73], 5, "prefix")
    assert shared_tiny.words.slots(["star " * 72], 3, "prefix").ids[0, -1] == shared_tiny.words.end


def test_usable_tokens_come_back_from_their_text(shared_tiny) -> None:
    words = shared_tiny.words
    usable = words.usable.nonzero()[:, 0].tolist()
    assert 30_000 < len(usable) < words.size
    assert not {words.start, words.end} & set(usable)
    some = usable[:: len(usable) // 200]
    assert all(words.ids(words.text([i])) == [i] for i in some)
    assert words.survives([words.ids(PROMPT)]) == [True]
    # "st ar", with its space
    assert words.survives([[words.ids("st")[0], words.ids("ar")[0]]]) == [True]
    pieces = (~words.usable).nonzero()[:50, 0].tolist()
    assert not all(words.survives([[i] for i in pieces]))
    assert Words(words.tokenizer).usable is words.usable, "found once for a tokenizer"


def test_a_copy_of_a_tokenizer_gives_the_same_texts(shared_tiny) -> None:
    """transformers' own decoding of a copy returns 'a</w>red</w>star</w>'."""
    words = shared_tiny.words
    copied = Words(copy.deepcopy(words.tokenizer))
    ids = words.ids(PROMPT)
    assert copied.text(ids) == words.text(ids) == PROMPT
    assert copied.survives([ids]) == [True]


def test_words_like_a_name(shared_tiny) -> None:
    words = shared_tiny.words
    like = words.like("star")
    assert like[words.ids("star")].all()
    assert like[words.ids("stars")].all()
    assert not like[words.ids("circle")].any()


def test_given_embeddings_stand_for_the_tokens(shared_tiny) -> None:
    """The table's own rows change nothing; the rows of another token act as that token."""
    tokens = shared_tiny.tokenize([PROMPT])
    rows = shared_tiny.table[tokens.tensors["ids"]]
    plain = shared_tiny.embed(tokens).tensors["states"]
    assert torch.equal(shared_tiny.embed(tokens, rows=rows).tensors["states"], plain)
    other = shared_tiny.tokenize([PROMPT.replace("star", "circle")])
    states = shared_tiny.embed(tokens, rows=shared_tiny.table[other.tensors["ids"]]).tensors[
        "states"
    ]
    assert torch.equal(states, shared_tiny.embed(other).tensors["states"])
    assert torch.equal(shared_tiny.embed(tokens).tensors["states"], plain)  # and the hook is gone


def test_images_of_an_encoded_prompt_are_those_of_the_prompt(shared_tiny) -> None:
    texts = [PROMPT, "a blue house"]
    plain = shared_tiny.sample(texts, seeds=[1, 2], steps=2, guidance=5.0)
    from_states = shared_tiny.sample(shared_tiny.encode(texts), seeds=[1, 2], steps=2, guidance=5.0)
    assert isinstance(shared_tiny.encode(texts), Condition)
    assert torch.equal(plain, from_states)


def test_a_padding_that_is_a_word_elsewhere(shared_tiny) -> None:
    """SD 2 pads with "!": before the end of a prompt it is one, behind it is not."""
    from transformers import CLIPTokenizer

    from concept_eraser.models.vocabulary import Words
    from concept_eraser.utils import resources

    words = Words(
        CLIPTokenizer.from_pretrained(
            resources.tiny_weights() / "tiny-sd" / "tokenizer", pad_token="!"
        )
    )
    assert words.pad != words.end
    ids = words.pack([words.ids("a star! on white")])
    assert int(ids[0, -1]) == words.pad
    assert words.ids(words.texts(ids)[0]) == words.ids("a star! on white")
    assert words.pad in words.ids("a star! on white")
    assert "star" in words.texts(ids)[0]
    assert words.texts(ids)[0].count("!") == 1


def test_a_masked_encoder_masks_tokens_that_come_from_no_text(tiny) -> None:
    tiny.pipeline.text_encoder.config.use_attention_mask = True
    tokens = tiny.tokenize([PROMPT, "a star"])
    bare = Condition({"ids": tokens.tensors["ids"]})
    assert tokens.tensors["mask"].sum(1).tolist() == [9, 4]
    torch.testing.assert_close(
        tiny.embed(bare).tensors["states"], tiny.embed(tokens).tensors["states"]
    )
    tiny.pipeline.text_encoder.config.use_attention_mask = False
    open_ = tiny.embed(bare).tensors["states"]
    tiny.pipeline.text_encoder.config.use_attention_mask = True
    # the mask has an effect
    assert not torch.allclose(open_[:, -1], tiny.embed(bare).tensors["states"][:, -1])


def test_prompts_that_were_cut_are_named(shared_tiny, caplog) -> None:
    shared_tiny.tokenize(["a star", *(f"{name} " + "star " * 100 for name in "abcdefg")])
    assert "7 of 8 prompts are longer" in caplog.text
    assert "'b star" in caplog.text
    assert "; ..." in caplog.text

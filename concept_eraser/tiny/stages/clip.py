"""Train the CLIP by InfoNCE with attribute heads, which are discarded.

Also its tokenizer and its text tower.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from concept_eraser.tiny import painter
from concept_eraser.tiny.stages.base import WIDTH, Stage
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups


def build_tokenizer(folder: Path) -> None:
    """Build the tokenizer of the real CLIP vocabulary, 49,408 entries.

    It comes from the BPE file that open_clip installs (MIT, OpenAI).
    """
    import gzip

    import open_clip
    from transformers import CLIPTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = file.read().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    characters = list(bytes_to_unicode().values())
    entries = [*characters, *(c + "</w>" for c in characters), *("".join(m) for m in merges)]
    entries += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {entry: i for i, entry in enumerate(entries)}
    CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77).save_pretrained(folder)


def new_clip() -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": 49408,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "projection_dim": WIDTH,
        "bos_token_id": 49406,
        "eos_token_id": 49407,
        "pad_token_id": 49407,
        "max_position_embeddings": 77,
    }
    vision = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": painter.SIZE,
        "patch_size": 8,
        "projection_dim": WIDTH,
    }
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))
    # with the default 0.02 the causal tower hardly depends on the words at first
    with torch.no_grad():
        clip.text_model.embeddings.token_embedding.weight.mul_(5)
    return clip


class ClipTrainee(nn.Module):
    """The CLIP with attribute heads on both towers.

    The heads help training only and are discarded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clip: Any = new_clip()
        sizes = [
            len(painter.SHAPES),
            len(painter.COLORS),
            len(painter.STYLES),
            len(painter.BACKGROUNDS),
        ]
        self.image_heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in sizes)
        self.text_heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in sizes)

    def embed(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        image = self.clip.visual_projection(self.clip.vision_model(images).pooler_output)
        text = self.clip.text_projection(self.clip.text_model(ids).pooler_output)
        return F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)

    def loss(
        self, images: Tensor, ids: Tensor, image_attributes: Tensor, caption_attributes: Tensor
    ) -> Tensor:
        """Return InfoNCE plus the cross-entropies of the attributes of images and captions."""
        image, text = self.embed(images, ids)
        return contrastive_loss(
            image,
            text,
            scale=self.clip.logit_scale,
            heads=(self.image_heads, self.text_heads),
            attributes=(image_attributes, caption_attributes),
        )


def contrastive_loss(
    image: Tensor,
    text: Tensor,
    *,
    scale: Tensor,
    heads: tuple[nn.ModuleList, nn.ModuleList],
    attributes: tuple[Tensor, Tensor],
) -> Tensor:
    """Return InfoNCE of unit vectors [n, width], plus cross-entropies of the attributes.

    Args:
        image: the embeddings of the images.
        text: the embeddings of their captions.
        scale: the logarithm of the scale of the cosines.
        heads: a linear layer for each attribute, of images and of captions.
        attributes: the labels [n, 4] of images and captions; -100 is not scored.
    """
    logits = scale.exp().clamp(max=100) * image @ text.T
    target = torch.arange(len(image))
    total = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    image_heads, text_heads = heads
    image_attributes, caption_attributes = attributes
    for i, weight in enumerate((1.0, 0.25, 0.25, 0.25)):
        total = total + weight * F.cross_entropy(image_heads[i](8 * image), image_attributes[:, i])
        total = total + weight * F.cross_entropy(
            text_heads[i](8 * text), caption_attributes[:, i], ignore_index=-100
        )
    return total


def train_clip(stage: Stage) -> dict:
    from transformers import CLIPTokenizer

    build_tokenizer(stage.folder / "tokenizer")
    tokenizer = CLIPTokenizer.from_pretrained(stage.folder / "tokenizer")
    torch.manual_seed(stage.seed)
    trainee = ClipTrainee()
    optimizer = torch.optim.AdamW(decay_groups(trainee, 0.05), lr=1e-3, betas=(0.9, 0.98))
    trainer = Trainer(
        stage="clip",
        module=trainee,
        optimizer=optimizer,
        steps=stage.steps(2600),
        seed=stage.seed,
        folder=stage.folder,
        ema_decay=0.995,
    )

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        scenes, images = painter.paint_batch(128, rng, held_out=False)
        captions = [painter.caption(scene, rng) for scene in scenes]
        ids = tokenizer([c.text for c in captions], padding=True, return_tensors="pt").input_ids
        with torch.autocast("cpu", torch.bfloat16):
            return trainee.loss(
                as_tensor(images),
                ids,
                torch.tensor([s.labels() for s in scenes]),
                torch.tensor([c.stated_attributes for c in captions]),
            )

    seconds = trainer.run(loss, stage.say)
    clip = trainee.clip.eval()
    clip.save_pretrained(stage.folder / "clip")

    def embed_images(images: Tensor) -> Tensor:
        return F.normalize(clip.visual_projection(clip.vision_model(images).pooler_output), dim=-1)

    def embed_texts(captions: list[str]) -> Tensor:
        ids = tokenizer(captions, padding=True, return_tensors="pt").input_ids
        return F.normalize(clip.text_projection(clip.text_model(ids).pooler_output), dim=-1)

    scores = score_clip(embed_images, embed_texts, stage.rng("clip-test"))
    return {"seconds": seconds, **scores}


@torch.no_grad()
def score_clip(
    embed_images: Callable[[Tensor], Tensor],
    embed_texts: Callable[[list[str]], Tensor],
    rng: np.random.Generator,
    n: int = 1000,
) -> dict:
    """Return the scores of a CLIP on new images of held-out combinations.

    They are the zero-shot accuracy of each attribute, the synonyms nearest their own shape, and
    matched against mismatched captions.

    Args:
        embed_images: images [n, 3, 64, 64] in [-1, 1] -> unit vectors [n, width].
        embed_texts: texts -> unit vectors [n, width].
        rng: the generator of the images and captions.
        n: images.
    """
    scenes, images = painter.paint_batch(n, rng, held_out=True)
    image = embed_images(as_tensor(images))
    labels = torch.tensor([scene.labels() for scene in scenes])
    prompts = {
        "shape": [f"a picture of a {s}" for s in painter.SHAPES],
        "color": [f"a picture of {painter.article(c)} shape" for c in painter.COLORS],
        "style": [
            f"a picture of {painter.article(painter.STYLE_WORDS[s][0])} shape"
            for s in painter.STYLES
        ],
        "background": [f"a shape {painter.BACKGROUND_PHRASES[b][0]}" for b in painter.BACKGROUNDS],
    }
    scores: dict = {"n": n}
    for i, (name, options) in enumerate(prompts.items()):
        scores[f"zero_shot_{name}"] = (
            ((image @ embed_texts(options).T).argmax(1) == labels[:, i]).float().mean().item()
        )
    shapes = embed_texts(prompts["shape"])
    synonyms = [(s, w) for s in painter.SHAPES for w in painter.SYNONYMS[s]]
    names = [f"a picture of a {w}" for _, w in synonyms]
    nearest = (embed_texts(names) @ shapes.T).argmax(1).tolist()
    scores["synonyms_right"] = sum(
        painter.SHAPES[j] == s for j, (s, _) in zip(nearest, synonyms, strict=True)
    )
    scores["synonyms"] = len(synonyms)
    captions = [painter.caption(scene, rng, full=True).text for scene in scenes]
    match = (image * embed_texts(captions)).sum(1)
    scores["match_mean"], scores["match_std"] = match.mean().item(), match.std().item()
    random = (image * embed_texts(captions[1:] + captions[:1])).sum(1)
    scores["random_mean"], scores["random_std"] = random.mean().item(), random.std().item()
    return scores


def text_tower(folder: Path) -> Any:
    """Return the text tower of the build's CLIP as a CLIPTextModel."""
    from transformers import CLIPConfig, CLIPTextModel

    config = CLIPConfig.from_pretrained(folder / "clip")
    tower = CLIPTextModel(config.text_config)
    weights = {
        k: v
        for k, v in load_file(folder / "clip" / "model.safetensors").items()
        if k.startswith("text_model.")
    }
    tensors = {k.removeprefix("text_model."): v for k, v in weights.items()}
    names = tower.state_dict().keys()
    tower.load_state_dict(tensors if "embeddings.token_embedding.weight" in names else weights)
    return tower.eval().requires_grad_(False)

"""The four things the bundled world is made of, each trained from scratch: judge, vae, clip, unet.

A stage is a function `(Stage) -> dict of scores` that leaves its weights in `Stage.folder`. `build` runs them;
the vae and the judge need nothing, the clip needs nothing, the unet needs the vae and the clip.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from concept_eraser.tiny import garbage, painter
from concept_eraser.tiny.judge import CLASSES, JudgeNet
from concept_eraser.tiny.trainer import Trainer, as_tensor, decay_groups, step_rng

SCALING = 0.18215  # what SD multiplies its latents with; ours are whitened so that the same number is right


@dataclass(frozen=True)
class Stage:
    folder: Path  # where checkpoints and results of the build lie
    seed: int
    say: Callable[[str], None]
    shrink: float = 1.0  # < 1 shortens every stage, for tests of the machinery

    def steps(self, n: int) -> int:
        return max(4, round(n * self.shrink))

    def rng(self, name: str) -> np.random.Generator:
        return step_rng(self.seed, name, 2**31)  # a draw no training step makes


def save_half(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = {k: (v.detach().half() if v.is_floating_point() else v.detach()).contiguous() for k, v in tensors.items()}
    save_file(half, path, metadata={"format": "pt"})


# --- judge ------------------------------------------------------------------------------------------------------


def _judge_batch(n: int, rng: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """A third each of clean drawings, damaged drawings and garbage; labels of -100 are not scored."""
    clean, x1 = painter.paint_batch(n // 3, rng)
    bent = [painter.random_scene(rng) for _ in range(n // 3)]
    x2 = np.stack([garbage.damaged(scene, rng) for scene in bent])
    none, x3 = garbage.garbage_batch(n - 2 * (n // 3), rng)
    labels = np.array([scene.labels() for scene in (*clean, *bent, *none)])
    labels[2 * (n // 3) :, 1:3] = -100  # garbage has neither a colour nor a style worth learning
    return as_tensor(np.concatenate([x1, x2, x3])), {
        name: torch.from_numpy(labels[:, i]) for i, name in enumerate(CLASSES)
    }


def train_judge(stage: Stage) -> dict:
    torch.manual_seed(stage.seed)
    judge = JudgeNet().train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(decay_groups(judge, 1e-2), lr=3e-3)
    trainer = Trainer("judge", judge, optimizer, stage.steps(1800), stage.seed, stage.folder, ema_decay=0.99)

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        pictures, labels = _judge_batch(96, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = judge(pictures.contiguous(memory_format=torch.channels_last))
        return sum((F.cross_entropy(logits[k].float(), labels[k]) for k in CLASSES), torch.zeros(()))

    seconds = trainer.run(loss, stage.say)
    judge.eval()
    with torch.no_grad():
        pictures, labels = _judge_batch(3000, stage.rng("judge-calibration"))
        logits = torch.cat([judge(part)["shape"] for part in pictures.split(250)])
        grid = torch.logspace(-1, 1, 81)
        nll = torch.stack([F.cross_entropy(logits / t, labels["shape"]) for t in grid])
        judge.temperature.fill_(float(grid[nll.argmin()]))
    scores = {"seconds": seconds, "temperature": float(judge.temperature), **score_judge(judge, stage.rng("judge-test"))}  # fmt: skip
    save_half(judge.state_dict(), stage.folder / "judge" / "model.safetensors")
    (stage.folder / "judge" / "config.json").write_text(json.dumps({"width": 24, "classes": CLASSES}, indent=1) + "\n")
    return scores


@torch.no_grad()
def score_judge(judge: JudgeNet, rng: np.random.Generator, n: int = 4000) -> dict:
    """Accuracy of each head on fresh drawings, share of each kind of garbage called none, calibration error."""
    scenes, pictures = painter.paint_batch(n, rng)
    labels = torch.tensor([scene.labels() for scene in scenes])
    logits = [judge(part) for part in as_tensor(pictures).split(250)]
    scores: dict = {"n_painted": n}
    for i, name in enumerate(CLASSES):
        predicted = torch.cat([part[name] for part in logits]).argmax(1)
        scores[f"accuracy_{name}"] = (predicted == labels[:, i]).float().mean().item()
    none = len(painter.SHAPES)
    for kind in garbage.KINDS:
        x = as_tensor(np.stack([garbage.garbage(kind, rng)[1] for _ in range(n // 10)]))
        scores[f"none_{kind}"] = (judge(x)["shape"].argmax(1) == none).float().mean().item()
    bent = [painter.random_scene(rng) for _ in range(n // 4)]
    x = as_tensor(np.stack([garbage.damaged(scene, rng) for scene in bent]))
    predicted = judge(x)["shape"].argmax(1)
    scores["accuracy_damaged"] = (predicted == torch.tensor([s.labels()[0] for s in bent])).float().mean().item()
    x, mixed = _judge_batch(3000, rng)
    probability = torch.cat([judge(part)["shape"].softmax(1) for part in x.split(250)])
    confidence, predicted = probability.max(1)
    right = (predicted == mixed["shape"]).float()
    bins = (confidence * 15).long().clamp(max=14)
    gaps = [(confidence[bins == b].mean() - right[bins == b].mean()).abs() * (bins == b).float().mean() for b in range(15) if (bins == b).any()]  # fmt: skip
    scores["calibration_error"] = float(torch.stack(gaps).sum())
    return scores


# --- vae --------------------------------------------------------------------------------------------------------

VAE_CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [16, 32, 32],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "sample_size": painter.SIZE,
    "scaling_factor": SCALING,
}


def train_vae(stage: Stage) -> dict:
    from diffusers import AutoencoderKL

    torch.manual_seed(stage.seed)
    vae = AutoencoderKL(**VAE_CONFIG)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, weight_decay=0.0)
    trainer = Trainer("vae", vae, optimizer, stage.steps(3600), stage.seed, stage.folder, ema_decay=0.99)

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        x = as_tensor(painter.paint_batch(16, rng, held_out=False)[1])
        posterior = vae.encode(x).latent_dist
        reconstruction = vae.decode(posterior.sample()).sample
        return F.mse_loss(reconstruction, x) + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel() * 4

    seconds = trainer.run(loss, stage.say)
    vae.eval()
    _whiten(vae, stage.rng("vae-whiten"))
    vae.save_pretrained(stage.folder / "vae")
    with torch.no_grad():
        x = as_tensor(painter.paint_batch(512, stage.rng("vae-test"), held_out=True)[1])
        latents = vae.encode(x).latent_dist.mean
        mse = F.mse_loss(vae.decode(latents).sample.clamp(-1, 1), x).item()
    return {"seconds": seconds, "psnr": float(10 * np.log10(4 / mse)), "latent_std": float((latents * SCALING).std())}


@torch.no_grad()
def _whiten(vae: nn.Module, rng: np.random.Generator) -> None:
    """Rescale the latents to mean 0 and deviation 1/0.18215 a channel, inside quant_conv and post_quant_conv."""
    x = as_tensor(painter.paint_batch(1024, rng, held_out=False)[1])
    latents = torch.cat([vae.encode(part).latent_dist.mean for part in x.split(64)])
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3)) * SCALING
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:4] /= std.view(-1, 1, 1, 1)
    quant.bias[:4] = (quant.bias[:4] - mean) / std
    quant.bias[4:] -= 2 * std.log()  # the second half is the log-variance
    post.bias += (post.weight[:, :, 0, 0] * mean).sum(1)
    post.weight *= std.view(1, -1, 1, 1)


# --- clip -------------------------------------------------------------------------------------------------------

WIDTH = 64


def build_tokenizer(folder: Path) -> None:
    """The real CLIP vocabulary, 49,408 entries, from the BPE file that open_clip installs (MIT, OpenAI)."""
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


def new_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {"vocab_size": 49408, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": WIDTH, "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407, "max_position_embeddings": 77}  # fmt: skip
    vision = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": painter.SIZE, "patch_size": 8, "projection_dim": WIDTH}  # fmt: skip
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=WIDTH))
    with torch.no_grad():  # the default 0.02 is so small that the causal tower hardly sees the words at first
        clip.text_model.embeddings.token_embedding.weight.mul_(5)
    return clip


class ClipTrainee(nn.Module):
    """The CLIP with attribute heads on both towers; the heads only help training and are thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.clip = new_clip()
        sizes = [len(painter.SHAPES), len(painter.COLORS), len(painter.STYLES), len(painter.BACKGROUNDS)]
        self.image_heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in sizes)
        self.text_heads = nn.ModuleList(nn.Linear(WIDTH, n) for n in sizes)

    def embed(self, pictures: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        image = self.clip.visual_projection(self.clip.vision_model(pictures).pooler_output)
        text = self.clip.text_projection(self.clip.text_model(ids).pooler_output)
        return F.normalize(image.float(), dim=-1), F.normalize(text.float(), dim=-1)

    def loss(self, pictures: Tensor, ids: Tensor, shown: Tensor, stated: Tensor) -> Tensor:
        """InfoNCE + cross-entropies of the attributes shown in the pictures and stated in the captions."""
        image, text = self.embed(pictures, ids)
        logits = self.clip.logit_scale.exp().clamp(max=100) * image @ text.T
        target = torch.arange(len(image))
        total = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
        for i, weight in enumerate((1.0, 0.25, 0.25, 0.25)):
            total = total + weight * F.cross_entropy(self.image_heads[i](8 * image), shown[:, i])
            total = total + weight * F.cross_entropy(self.text_heads[i](8 * text), stated[:, i], ignore_index=-100)
        return total


def train_clip(stage: Stage) -> dict:
    from transformers import CLIPTokenizer

    build_tokenizer(stage.folder / "tokenizer")
    tokenizer = CLIPTokenizer.from_pretrained(stage.folder / "tokenizer")
    torch.manual_seed(stage.seed)
    trainee = ClipTrainee()
    optimizer = torch.optim.AdamW(decay_groups(trainee, 0.05), lr=1e-3, betas=(0.9, 0.98))
    trainer = Trainer("clip", trainee, optimizer, stage.steps(2600), stage.seed, stage.folder, ema_decay=0.995)

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        scenes, pictures = painter.paint_batch(128, rng, held_out=False)
        captions = [painter.caption(scene, rng) for scene in scenes]
        ids = tokenizer([c.text for c in captions], padding=True, return_tensors="pt").input_ids
        with torch.autocast("cpu", torch.bfloat16):
            return trainee.loss(as_tensor(pictures), ids, torch.tensor([s.labels() for s in scenes]), torch.tensor([c.stated for c in captions]))  # fmt: skip

    seconds = trainer.run(loss, stage.say)
    clip = trainee.clip.eval()
    clip.save_pretrained(stage.folder / "clip")
    return {"seconds": seconds, **score_clip(clip, tokenizer, stage.rng("clip-test"))}


@torch.no_grad()
def score_clip(clip: nn.Module, tokenizer: Callable, rng: np.random.Generator, n: int = 1000) -> dict:
    """Zero-shot accuracy of each attribute, synonyms nearest their own shape, matched against mismatched captions."""

    def text(captions: list[str]) -> Tensor:
        ids = tokenizer(captions, padding=True, return_tensors="pt").input_ids
        return F.normalize(clip.text_projection(clip.text_model(ids).pooler_output), dim=-1)

    scenes, pictures = painter.paint_batch(n, rng, held_out=True)
    image = F.normalize(clip.visual_projection(clip.vision_model(as_tensor(pictures)).pooler_output), dim=-1)
    labels = torch.tensor([scene.labels() for scene in scenes])
    prompts = {
        "shape": [f"a picture of a {s}" for s in painter.SHAPES],
        "color": [f"a picture of {painter.article(c)} shape" for c in painter.COLORS],
        "style": [f"a picture of {painter.article(painter.STYLE_WORDS[s][0])} shape" for s in painter.STYLES],
        "background": [f"a shape {painter.BACKGROUND_PHRASES[b][0]}" for b in painter.BACKGROUNDS],
    }
    scores: dict = {"n": n}
    for i, (name, options) in enumerate(prompts.items()):
        scores[f"zero_shot_{name}"] = ((image @ text(options).T).argmax(1) == labels[:, i]).float().mean().item()
    shapes = text(prompts["shape"])
    synonyms = [(s, w) for s in painter.SHAPES for w in painter.SYNONYMS[s]]
    nearest = (text([f"a picture of a {w}" for _, w in synonyms]) @ shapes.T).argmax(1).tolist()
    scores["synonyms_right"] = sum(painter.SHAPES[j] == s for j, (s, _) in zip(nearest, synonyms, strict=True))
    scores["synonyms"] = len(synonyms)
    captions = [painter.caption(scene, rng, full=True).text for scene in scenes]
    match = (image * text(captions)).sum(1)
    scores["match_mean"], scores["match_std"] = match.mean().item(), match.std().item()
    random = (image * text(captions[1:] + captions[:1])).sum(1)
    scores["random_mean"], scores["random_std"] = random.mean().item(), random.std().item()
    return scores


# --- unet -------------------------------------------------------------------------------------------------------

UNET_CONFIG = {
    "sample_size": painter.SIZE // 4,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [64, 128],
    "layers_per_block": 1,
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 4,
    "norm_num_groups": 16,
}
SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


def _latents(stage: Stage, n: int) -> tuple[list[painter.Scene], Tensor]:
    """Latents of `n` drawings (means of the posterior, scaled), painted once."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(stage.folder / "vae").eval()
    rng = stage.rng("unet-data")
    scenes, parts = [], []
    for done in range(0, n, 256):
        some, pictures = painter.paint_batch(256, rng, held_out=False)
        scenes += some
        with torch.no_grad():
            parts.append(vae.encode(as_tensor(pictures)).latent_dist.mean * SCALING)
        if done % 4096 == 0:
            stage.say(f"unet: painting and encoding {done}/{n}")
    return scenes, torch.cat(parts)


def train_unet(stage: Stage) -> dict:
    from diffusers import DDIMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(stage.folder / "tokenizer")
    text_encoder = text_tower(stage.folder)
    assert isinstance(text_encoder, CLIPTextModel)
    scenes, latents = _latents(stage, 24576 if stage.shrink >= 1 else 512)
    scheduler = DDIMScheduler(**SCHEDULE)
    alphas = scheduler.alphas_cumprod
    snr_weight = (5 * (1 - alphas) / alphas).clamp(max=1)  # min-SNR-5 for epsilon prediction (arXiv 2303.09556)
    torch.manual_seed(stage.seed)
    unet = UNet2DConditionModel(**UNET_CONFIG)
    optimizer = torch.optim.AdamW(decay_groups(unet, 1e-2), lr=1e-3, betas=(0.9, 0.99))
    trainer = Trainer("unet", unet, optimizer, stage.steps(UNET_STEPS), stage.seed, stage.folder, flat=0.55, ema_decay=0.998)  # fmt: skip

    def loss(step: int, rng: np.random.Generator) -> Tensor:
        chosen = rng.integers(0, len(scenes), 32)
        captions = ["" if rng.random() < 0.1 else painter.caption(scenes[i], rng).text for i in chosen]
        ids = tokenizer(captions, padding="max_length", max_length=77, return_tensors="pt").input_ids
        with torch.no_grad():
            states = text_encoder(ids)[0]
        clean = latents[torch.from_numpy(chosen)]
        noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32))
        t = torch.from_numpy(rng.integers(0, 1000, len(chosen)))
        noisy = scheduler.add_noise(clean, noise, t)
        with torch.autocast("cpu", torch.bfloat16):
            predicted = unet(noisy, t, states).sample
        errors = (predicted.float() - noise).square().mean((1, 2, 3))
        return (snr_weight[t] * errors).mean()

    seconds = trainer.run(loss, stage.say)
    unet.save_pretrained(stage.folder / "unet")
    return {"seconds": seconds, "steps": trainer.steps}


UNET_STEPS = 6000


def text_tower(folder: Path) -> nn.Module:
    """The text tower of the build's CLIP as a CLIPTextModel."""
    from transformers import CLIPConfig, CLIPTextModel

    config = CLIPConfig.from_pretrained(folder / "clip")
    tower = CLIPTextModel(config.text_config)
    weights = {k: v for k, v in load_file(folder / "clip" / "model.safetensors").items() if k.startswith("text_model.")}
    stripped = {k.removeprefix("text_model."): v for k, v in weights.items()}
    wanted = tower.state_dict().keys()
    tower.load_state_dict(stripped if "embeddings.token_embedding.weight" in wanted else weights)
    return tower.eval().requires_grad_(False)


STAGES: dict[str, Callable[[Stage], dict]] = {
    "judge": train_judge,
    "vae": train_vae,
    "clip": train_clip,
    "unet": train_unet,
}

"""Seeds of the batches that are drawn before the training, for a mask or for a projection."""

from __future__ import annotations

from concept_eraser.utils.provenance import derive_seed

BATCHES = 8  # chosen here; the papers and codes use all data


def micro_batch_seeds(
    seed: int, purpose: str, *, batch_size: int, micro_batches: int
) -> list[list[int]]:
    """Return the seeds of the examples of each micro-batch of BATCHES draws.

    The examples of a draw do not depend on how it is divided into micro-batches.

    Args:
        seed: The seed of the training.
        purpose: Another purpose gives other seeds.
        batch_size: The examples of a micro-batch.
        micro_batches: The micro-batches of a draw.
    """
    return [
        [derive_seed(seed, purpose, i, m * batch_size + e) for e in range(batch_size)]
        for i in range(BATCHES)
        for m in range(micro_batches)
    ]

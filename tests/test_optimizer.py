"""Newton-Schulz on the Gram matrix is the iteration that it stands for."""

from __future__ import annotations

import pytest
import torch

from train.optimizer import STEPS, orthogonalise


def iterated(matrix: torch.Tensor) -> torch.Tensor:
    """The quintic iteration as it is published, on the matrix itself."""
    x = matrix / matrix.norm()
    for _ in range(STEPS):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(48, 48), (32, 160), (160, 32)])
@pytest.mark.parametrize("rank", [None, 5])
def test_orthogonalise_is_the_published_iteration(shape, rank):
    """Of tall, wide and square matrices, of full rank and far from it, in fp32 against fp64."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(*shape, generator=generator)
    if rank:
        matrix = torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)
    assert orthogonalise(matrix).double() == pytest.approx(iterated(matrix.double()), abs=2e-4)


def test_five_steps_bring_singular_values_near_one():
    values = torch.linalg.svdvals(orthogonalise(torch.randn(64, 256, generator=torch.Generator().manual_seed(1))))
    assert values.min() > 0.6 and values.max() < 1.3

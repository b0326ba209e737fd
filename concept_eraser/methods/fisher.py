"""The Fisher matrix of a model with an exponential-family output, and linear systems with it.

F is the mean over the samples of J^T Sigma J, with J = df/dtheta. Sigma is diag(p) - p p^T
(softmax) or I (Gaussian): labels come from the model, not from the data. A product needs one pass
in forward mode (J v) and one in reverse (J^T Sigma J v). The dense matrix and K-FAC are those of
curvlinops, conjugate gradients those of scipy. natural_gradient.py uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from concept_eraser.methods.vectors import Vec, norm, spectral_norm
from concept_eraser.utils.extras import import_from_extra

# inputs [b, ...], labels [b] (softmax) or targets [b, d] (gaussian)
Batches = Sequence[tuple[Tensor, Tensor]]
Solver = Literal["cg", "exact", "diagonal", "kfac", "lissa"]
EXACT_LIMIT = 5000  # parameters; a dense matrix of more is too large


@dataclass(frozen=True)
class Risk:
    """L(S, theta) = 1/n sum_z -log P(y | f(x; theta)) + ridge/2 ||theta||^2 of a model.

    likelihood: "softmax" (f are logits, cross-entropy) or "gaussian" (1/2 ||y - f||^2).
    """

    model: nn.Module
    likelihood: Literal["softmax", "gaussian"] = "softmax"
    ridge: float = 0.0

    @property
    def params(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.model.parameters() if p.requires_grad)

    def mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.likelihood == "softmax":
            return nn.functional.cross_entropy(output, target)
        return 0.5 * (output - target).square().flatten(1).sum(1).mean()

    def sum_gradient(self, batches: Batches) -> Vec:
        """Return sum_z grad l(z, theta), without the ridge."""
        total = tuple(torch.zeros_like(p) for p in self.params)
        for x, y in batches:
            loss = self.mean_loss(self.model(x), y) * len(x)
            parts = torch.autograd.grad(
                loss, self.params, allow_unused=True, materialize_grads=True
            )
            total = tuple(a + b for a, b in zip(total, parts, strict=True))
        return total

    def gradient(self, batches: Batches) -> Vec:
        """Return grad L(S, theta), with the ridge."""
        n = count(batches)
        return tuple(
            g / n + self.ridge * p.detach()
            for g, p in zip(self.sum_gradient(batches), self.params, strict=True)
        )

    def certificate(self, batches: Batches, convexity: float) -> float:
        """Bound the distance from the minimum by ||grad L(S, theta)|| / mu.

        The bound of ||theta - argmin L(S)|| holds for a mu-strongly convex L. It needs no other
        constant.
        """
        if convexity <= 0:
            raise ValueError(
                "the certificate needs a risk that is strongly convex, with its "
                f"constant > 0; found {convexity}"
            )
        return float(norm(self.gradient(batches))) / convexity


def count(batches: Batches) -> int:
    return sum(len(x) for x, _ in batches)


def flatten(v: Vec) -> Tensor:
    return torch.cat([part.reshape(-1) for part in v])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> Vec:
    parts = flat.split([p.numel() for p in like])
    return tuple(part.reshape(p.shape).to(p) for part, p in zip(parts, like, strict=True))


@dataclass(frozen=True)
class Fisher:
    """F(S, theta) + shift I, with F the mean over the samples of J^T Sigma J."""

    risk: Risk
    batches: Batches
    shift: float = 0.0

    @cached_property
    def _operator(self) -> Any:
        with import_from_extra("curvature", "the Fisher matrix (natural_gradient, hvp: ggn)"):
            from curvlinops import GGNLinearOperator

        class MeanLoss(nn.Module):
            reduction = "mean"  # curvlinops needs it

            def forward(_self, output: Tensor, target: Tensor) -> Tensor:  # noqa: N805
                return self.risk.mean_loss(output, target)

        return GGNLinearOperator(
            self.risk.model,
            MeanLoss(),
            list(self.risk.params),
            self.batches,
            check_deterministic=False,
        )

    def product(self, v: Vec) -> Vec:
        """Return (F + shift I) v by one jvp and one vjp for each batch.

        A layer without forward mode needs curvlinops' product, which takes longer.
        """
        try:
            products: Sequence[Tensor] = self._direct_product(v)
        except NotImplementedError:
            products = self._operator @ list(v)
        return tuple(f.detach() + self.shift * part for f, part in zip(products, v, strict=True))

    def _direct_product(self, v: Vec) -> Vec:
        """Return F v: J v in forward mode, then J^T Sigma J v by the backward pass."""
        model, params = self.risk.model, self.risk.params
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        n = count(self.batches)
        total = tuple(torch.zeros_like(p) for p in params)
        # fused attention has no forward mode
        with sdpa_kernel(SDPBackend.MATH):
            for x, _ in self.batches:
                change = self._output_change(names, v, x)
                output = model(x)
                weighted_change = self._output_covariance(output.detach(), change) / n
                parts = torch.autograd.grad(
                    output, params, weighted_change, allow_unused=True, materialize_grads=True
                )
                total = tuple(a + b for a, b in zip(total, parts, strict=True))
        return total

    @torch.no_grad()
    def _output_change(self, names: Sequence[str], v: Vec, x: Tensor) -> Tensor:
        """Return J v for the inputs x."""
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(p.detach(), part)
                for p, part in zip(self.risk.params, v, strict=True)
            ]
            result = functional_call(self.risk.model, dict(zip(names, duals, strict=True)), (x,))
            output, change = forward_ad.unpack_dual(result)
        return torch.zeros_like(output) if change is None else change

    def _output_covariance(self, output: Tensor, change: Tensor) -> Tensor:
        """Return Sigma u for each sample, with u a change of its output."""
        if self.risk.likelihood == "gaussian":
            return change
        p = output.softmax(1)
        return p * (change - (p * change).sum(1, keepdim=True))

    def dense(self) -> Tensor:
        """Return the matrix [p, p]. Raises ValueError for more than EXACT_LIMIT parameters."""
        size = sum(p.numel() for p in self.risk.params)
        if size > EXACT_LIMIT:
            raise ValueError(
                f"solver: exact builds a {size} x {size} matrix; it is meant for at most "
                f"{EXACT_LIMIT} parameters. Use cg"
            )
        eye = torch.eye(size, dtype=self.risk.params[0].dtype, device=self.risk.params[0].device)
        matrix: Tensor = (self._operator @ eye).detach()
        return matrix + self.shift * eye

    def diagonal(self) -> Tensor:
        """Return the exact diagonal [p].

        It is the sum over the outputs of the squares of sqrt(Sigma) J, sample by sample.
        """
        params = self.risk.params
        total = torch.zeros(
            sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device
        )
        for x, _ in self.batches:
            for i in range(len(x)):
                output = self.risk.model(x[i : i + 1])[0].reshape(-1)
                for row in _root(output.detach(), self.risk.likelihood):
                    parts = torch.autograd.grad(
                        output @ row,
                        params,
                        retain_graph=True,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                    total += flatten(parts) ** 2
        return total / count(self.batches) + self.shift


def _root(output: Tensor, likelihood: str) -> Tensor:
    """Return rows r_k with sum_k r_k r_k^T = Sigma. Softmax: r_k = sqrt(p_k) (e_k - p)."""
    eye = torch.eye(len(output), dtype=output.dtype, device=output.device)
    if likelihood == "gaussian":
        return eye
    p = output.softmax(0)
    return p.sqrt()[:, None] * (eye - p)


def solve(
    fisher: Fisher,
    v: Vec,
    solver: Solver,
    *,
    iterations: int = 200,
    tolerance: float = 1e-10,
    sigma: float = 0.0,
) -> Vec:
    """Return (F + shift I)^-1 v.

    sigma: for the solver lissa; 0 stands for 1.1 lambda_max. Raises ValueError if the matrix is
    singular.
    """
    if solver == "exact":
        try:
            return unflatten(torch.linalg.solve(fisher.dense(), flatten(v)), v)
        except torch.linalg.LinAlgError:
            raise ValueError(
                "the Fisher matrix is singular (a softmax model's always is); give the "
                "risk a ridge or damping > 0"
            ) from None
    if solver == "diagonal":
        return unflatten(flatten(v) / fisher.diagonal(), v)
    if solver == "kfac":
        return _kfac(fisher, v)
    if solver == "lissa":
        return lissa(
            fisher.product, v, sigma or 1.1 * spectral_norm(fisher.product, v, 50), iterations
        )
    return _cg(fisher, v, iterations, tolerance)


def _cg(fisher: Fisher, v: Vec, iterations: int, tolerance: float) -> Vec:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator, cg

    size = sum(p.numel() for p in v)

    def multiply(x: Any) -> Any:
        return (
            flatten(fisher.product(unflatten(torch.from_numpy(np.asarray(x).reshape(-1)), v)))
            .double()
            .cpu()
            .numpy()
        )

    solution, _ = cg(
        LinearOperator((size, size), matvec=multiply, dtype=np.float64),
        flatten(v).double().cpu().numpy(),
        rtol=tolerance,
        maxiter=iterations,
    )
    return unflatten(torch.from_numpy(solution), v)


def _kfac(fisher: Fisher, v: Vec) -> Vec:
    """Return (F + shift I)^-1 v by one Kronecker product for each layer.

    It is exact for one linear layer without weight sharing and squared error.
    """
    with import_from_extra("curvature", "solver: kfac"):
        from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    if fisher.shift <= 0:
        raise ValueError(
            "solver: kfac needs damping (or a ridge) > 0: a Kronecker factor of few "
            "samples is singular"
        )
    gaussian = fisher.risk.likelihood == "gaussian"
    outputs = fisher.risk.model(fisher.batches[0][0][:1]).numel()
    # torch's MSE is the mean over outputs, without our 1/2
    scale = outputs / 2 if gaussian else 1.0
    loss = nn.MSELoss() if gaussian else nn.CrossEntropyLoss()
    factors = KFACLinearOperator(
        fisher.risk.model,
        loss,
        list(fisher.risk.params),
        fisher.batches,
        fisher_type="type-2",
        check_deterministic=False,
        separate_weight_and_bias=False,
    )
    inverse = KFACInverseLinearOperator(
        factors, damping=fisher.shift / scale, use_exact_damping=True
    )
    return tuple(part.detach() / scale for part in inverse @ list(v))


def lissa(multiply: Callable[[Vec], Vec], x: Vec, sigma: float, iterations: int) -> Vec:
    """Return A^-1 x approximately, by v_t = x + v_{t-1} - A v_{t-1} / sigma with v_0 = x.

    The result is v_T / sigma = (1 - (1 - A/sigma)^(T+1)) / A x. The recursion converges for sigma >
    lambda_max(A) / 2. Directions with an eigenvalue a << sigma / T stay damped.
    """
    v = x
    for _ in range(iterations):
        v = tuple(a + b - c / sigma for a, b, c in zip(x, v, multiply(v), strict=True))
    return tuple(part / sigma for part in v)

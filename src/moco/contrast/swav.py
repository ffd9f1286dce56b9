"""SwAV (arXiv 2006.09882): predict the cluster of one view from the other, where all clusters must be equally full."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco.contrast.collectives import gather_rows, own_rows
from moco.contrast.dictionary import Queue
from moco.contrast.method import Method, StepOutput, feature_spread


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Codes: soft clusters of a batch such that all clusters are equally full (section 3.1, "Computing codes online").

    scores: (B, K) similarities to the prototypes. Returns (B, K), each row a distribution: exp(scores / ε), its columns
    and rows scaled in turn `iterations` times (Sinkhorn-Knopp). By logarithms in float32, so that no ε is too small.
    """
    codes = scores.float() / epsilon
    for _ in range(iterations):
        codes = codes - codes.logsumexp(0, keepdim=True)
        codes = codes - codes.logsumexp(1, keepdim=True)
    return codes.exp()


class SwAV(Method):
    """One encoder, prototypes, and the swapped prediction: the code of a view from the features of the other.

    The loss is −½ Σ over both ways round of Σₖ codeₖ(a) · ln softmaxₖ(z_b·cₖ/τ) (equation 2). With small views v of
    the pictures (multi-crop, section 3.2 and equation 6) the code of each of the two is to be predicted from all other
    views, which count alike; small views have no codes. Codes come from all processes' features and carry no gradient;
    gradient reaches the encoder and the prototypes cₖ, which are brought back to unit norm before each step.

    encoder: maps a batch to features (N, D). head: maps them to (N, C). prototypes: K, and dim: C. temperature: τ.
    epsilon: of `sinkhorn`. frozen: part of the training in which prototypes stay as they are (the paper's: the first
    epoch). queue_size: features of each view kept from earlier steps, that take part in finding the codes, where a
    batch is small beside K; 0 for none (the paper's: 3,840 at a batch of 256). queue_from: part of the training after
    which they do. Views of one size are encoded as one batch, and so normalised together. Raises ValueError for sizes,
    a temperature or an epsilon that are not positive.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Module | None = None,
        *,
        prototypes: int = 3000,
        dim: int = 128,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        frozen: float = 0.0,
        queue_size: int = 0,
        queue_from: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(encoder, head, seed=seed)
        if not (0 < temperature < math.inf and 0 < epsilon < math.inf):
            raise ValueError(f"temperature and epsilon must be positive, not {temperature} and {epsilon}")
        if prototypes < 2 or dim < 1:
            raise ValueError(f"prototypes must be 2 or more and dim positive, not {prototypes} and {dim}")
        self.prototypes = nn.Linear(dim, prototypes, bias=False)
        self.temperature, self.epsilon = temperature, epsilon
        self.frozen, self.queue_from = frozen, queue_from
        self.queue_a = Queue(queue_size, dim, seed=seed) if queue_size else None
        self.queue_b = Queue(queue_size, dim, seed=seed + 1) if queue_size else None
        self._progress = 0.0
        self._filled = False
        self._pending: list[tuple[Tensor, Tensor]] = []

    def begin_step(self, progress: float = 0.0) -> None:
        """Bring the prototypes back to unit norm: once per optimiser step, before its first `forward`."""
        self.end_step()
        super().begin_step(progress)
        self._progress = progress
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def forward(
        self, view_a: Tensor, view_b: Tensor, ids: Tensor | None = None, small: Sequence[Tensor] = ()
    ) -> StepOutput:
        """Loss of a batch of view pairs (N, …). In training mode features are kept for `end_step`.

        ids: not needed. small: further views of the same pictures, each (N, C, s, s), all of one size.
        """
        both = F.normalize(self.query_encoder(torch.cat([view_a, view_b])).float(), dim=1)
        first, second = both.chunk(2)
        features = both
        if small:
            features = torch.cat([both, F.normalize(self.query_encoder(torch.cat(list(small))).float(), dim=1)])
        prototypes = self.prototypes.weight.float()
        if self._progress < self.frozen:
            # A gradient of zero, not none: processes wait for that of every parameter.
            prototypes = prototypes.detach() + 0 * prototypes
        with torch.autocast(both.device.type, enabled=False):
            predictions = (features @ prototypes.T / self.temperature).log_softmax(1)
            code_a, code_b = self._codes(first, self.queue_a), self._codes(second, self.queue_b)
            # What a view is to predict: the other's code, and a small view those of both.
            codes = torch.cat([code_b, code_a, *([code_a + code_b] * len(small))])
        if self.training:
            self._pending.append((first.detach(), second.detach()))
        mean = predictions.detach()[: len(both)].exp().mean(0)
        return StepOutput(
            -(codes * predictions).sum() / (2 * len(view_a) * (1 + len(small))),
            {
                "positive_similarity": (first * second).sum(1).mean().detach(),
                "prototype_usage": (-(mean * mean.log()).sum()).exp() / len(mean),
                "feature_spread": feature_spread(both),
            },
        )

    @torch.no_grad()
    def _codes(self, features: Tensor, queue: Queue | None) -> Tensor:
        """The codes of this process's features (N, C) of a view, found together with everybody's: (N, K)."""
        everything = gather_rows(features)
        count = len(everything)
        if queue is not None and self._progress >= self.queue_from and self._full(queue):
            everything = torch.cat([everything, queue.keys])
        return own_rows(sinkhorn(everything @ self.prototypes.weight.float().T, self.epsilon)[:count])

    def _full(self, queue: Queue) -> bool:
        """Whether no random vector is left in a queue; the other one is as full."""
        # Looking waits for the device, so not again once it is so.
        self._filled = self._filled or bool((queue.births >= 0).all())
        return self._filled

    def end_step(self) -> None:
        """Put the features of this step into the queues, those of all processes, and count the step.

        Call it after the optimiser; `begin_step` makes up for it where it was forgotten.
        """
        if not self._pending:
            return
        if self.queue_a is not None and self.queue_b is not None:
            for first, second in self._pending:
                self.queue_a.enqueue(gather_rows(first), step=self.step)
                self.queue_b.enqueue(gather_rows(second), step=self.step)
        self._pending.clear()
        super().end_step()

    def skip_step(self, step: int) -> None:
        """Forget the features of a step that went wrong, and count it: the next one is `step` + 1."""
        self._pending.clear()
        super().skip_step(step)

    def remembered(self) -> list[Tensor]:
        """The queues."""
        return [buffer for queue in (self.queue_a, self.queue_b) if queue is not None for buffer in queue.buffers()]

    def set_extra_state(self, state: int) -> None:
        """Restore the step count; the queues are looked at anew."""
        super().set_extra_state(state)
        self._filled = False

    @property
    def chance_loss(self) -> float:
        """The loss of predictions that are the same for all prototypes: ln(K)."""
        return math.log(len(self.prototypes.weight))

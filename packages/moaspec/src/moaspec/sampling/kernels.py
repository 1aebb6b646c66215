"""Where kernels join: functions that compute the same choices and the same noise in one call.

`moaspec.backends.fast_sampling` registers those for CPUs. Without any, PyTorch computes both, with
the same bits.

Legend: N nodes, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from moaspec_core.sampling.params import FILTERS, SamplingParams


class SamplerParams(NamedTuple):
    """How one token is chosen, see `sampler_params` in `moaspec.sampling.choose`."""

    temperature: float  # above 0
    top_k: int  # 0 for all
    top_p: float  # 1 for all
    min_p: float  # 0 for all
    seed: int  # of the noise; int64, as the next two
    choice: int  # which of several continuations
    position: int


_UNKNOWN = [name for name in FILTERS if name not in SamplerParams._fields]


def supported(sampling: SamplingParams) -> bool:
    """Whether kernels choose by all of these settings; `SamplerParams` names those they know."""
    return not sampling.changes(_UNKNOWN)


class SamplingKernels(Protocol):
    """A module of kernels."""

    def can_choose(self, logits_NV: Tensor) -> bool:
        """Whether `choose` supports these logits."""
        ...

    def choose(self, logits_NV: Tensor, samplers: Sequence[SamplerParams]) -> list[int]:
        """The token of the largest logit / temperature + noise, after the filters."""
        ...

    def can_draw(self, *arguments: Tensor) -> bool:
        """Whether `draw_bits` supports these arguments."""
        ...

    def draw_bits(self, seed: Tensor, choice: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
        """The random bits of `moaspec.sampling.noise`; arguments int64, broadcast."""
        ...


_registered: list[SamplingKernels] = []


def register(kernels: SamplingKernels) -> None:
    """Let these kernels choose and draw from now on, in this process."""
    _registered[:] = [kernels]


def registered() -> SamplingKernels | None:
    """The kernels of this process; None without any."""
    return _registered[0] if _registered else None

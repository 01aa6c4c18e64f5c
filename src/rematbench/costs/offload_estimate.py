"""The estimate of first-stage bytes with which ATC'24's artifact chooses the offloaded share."""

from msgspec import Struct

from rematbench.inputs.layout import Layout
from rematbench.workload import Model


class PipelineOffloadEstimator(Struct, frozen=True, kw_only=True):
    """First-stage bytes of a pipeline that offloads a share alpha of its activations.

    Source: our derivation from Yuan et al., USENIX ATC 2024 (artifact kwai/Megatron-Kwai), which
    reproduces every alpha of Figure 9:
    M(alpha) = (6 + 12/(c d)) P + [(1 - alpha)(v p + p - 1) + 4 alpha] C
    with P the first stage's parameters (`parameters`) and C the bytes that one chunk saves for one
    micro-batch (`chunk_bytes`); four chunks are on the device while in transit.
    """

    parameters: float
    state_shards: int
    chunks_in_flight: int
    chunk_bytes: float

    @property
    def state_bytes(self) -> float:
        """bf16 parameters, fp32 gradients, and this rank's share of the optimizer states."""
        return (6 + 12 / self.state_shards) * self.parameters

    def peak_bytes(self, alpha: float) -> float:
        """Estimated device bytes of the first stage."""
        chunks = (1 - alpha) * self.chunks_in_flight + 4 * alpha
        return self.state_bytes + chunks * self.chunk_bytes

    def smallest_alpha(self, cap_bytes: float) -> float:
        """The smallest alpha in [0, 1] whose estimate is at most `cap_bytes`, to three decimals as
        published; 0 if alpha 0 fits or offloading frees nothing, 1 if no alpha fits."""
        slope = (self.chunks_in_flight - 4) * self.chunk_bytes
        excess = self.peak_bytes(0.0) - cap_bytes
        if excess <= 0 or slope <= 0:
            return 0.0
        return min(1.0, round(excess / slope, 3))


def pipeline_offload_estimator(
    model: Model, layout: Layout, chunk_bytes: float
) -> PipelineOffloadEstimator:
    """The estimator for a Llama-like model (gated MLP, no biases) under a layout.

    P(t, p) = ((L/p) (2 + 2 g/a + 3 H/h) h^2 + h V [first stage] + h V [last stage]) / t; norms and
    vocabulary padding are not counted.
    """
    layers = model.active_layer_matrices / layout.pp
    ends = model.hidden * model.vocab * (2 if layout.pp == 1 else 1)
    return PipelineOffloadEstimator(
        parameters=(layers + ends) / layout.tp,
        state_shards=layout.state_shards,
        chunks_in_flight=layout.vpp * layout.pp + layout.pp - 1,
        chunk_bytes=chunk_bytes,
    )

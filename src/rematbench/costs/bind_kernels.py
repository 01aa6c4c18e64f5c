"""Seconds of the kernels and operators of one problem."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, fsum
from typing import Literal

from msgspec.structs import replace

from rematbench.costs import formulas, kernel_seconds, tiles
from rematbench.costs.operators.kernels import Attention, Elementwise, Gemm, Kernel, Named, launches
from rematbench.costs.operators.launches import captures_experts
from rematbench.costs.operators.ops import Op
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.constants import (
    Calibration,
    CommonConstants,
    GpuConstants,
    NetworkConstants,
    SystemConstants,
)
from rematbench.inputs.kernel_rates import AttentionRates, Device, Quantity, RateError
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import shipped_balances
from rematbench.inputs.precision import peak_flop_per_s
from rematbench.inputs.recipes import Recipe, recipe_of
from rematbench.inputs.system import AttentionBackend, System
from rematbench.workload import Workload

Direction = Literal["forward", "backward_input", "backward_weight"]


@dataclass(kw_only=True, eq=False)
class KernelCosts:
    """Seconds of one rank's kernels, cached. `untimed`: why they cannot be timed (empty: they
    can)."""

    cluster: Cluster
    system: System
    layout: Layout
    workload: Workload
    calibration: Calibration
    attention: AttentionBackend
    untimed: str = ""

    def __post_init__(self) -> None:
        self._kernels: dict[tuple[Kernel, Direction], float] = {}
        self._ops: dict[tuple[int, Direction, float], tuple[Op, float]] = {}

    def require_rates(self) -> None:
        """RateError, with the reason, if kernels cannot be timed."""
        if self.untimed:
            raise RateError(self.untimed)

    @cached_property
    def peak_flop_per_s(self) -> float:
        """The GPU's dense peak of matrix products in the compute precision; 0 if not declared."""
        precision, tf32 = self.workload.precision, self.system.kernels.tf32
        return peak_flop_per_s(self.cluster, self.calibration, precision, tf32)

    @cached_property
    def gpu(self) -> GpuConstants:
        """The constants of the cluster's GPU generation; RateError if kernels cannot be timed."""
        self.require_rates()
        return self.calibration.gpu(self.cluster.generation)

    @cached_property
    def balance(self) -> float:
        """The GPU's FLOP per HBM byte divided by that of the nearest shipped GPU of its generation;
        1 within the range of the shipped GPUs, because their kernels were measured."""
        own, shipped = self.cluster.flop_per_byte, shipped_balances(self.cluster.generation)
        if not shipped:
            return 1.0
        return own / min(max(own, shipped[0]), shipped[1])

    @cached_property
    def network(self) -> NetworkConstants:
        return self.calibration.networks[self.calibration.network_entry(self.cluster.constants)]

    @cached_property
    def stack(self) -> SystemConstants:
        return self.calibration.systems[self.calibration.system_entry(self.system.constants)]

    @property
    def common(self) -> CommonConstants:
        return self.calibration.common

    @cached_property
    def recipe(self) -> Recipe | None:
        return recipe_of(self.workload)

    def calls(self, op: Op, direction: Direction) -> int:
        """The number of launches that the host issues for an operator in a direction; at most one
        if a compiler fuses operators."""
        kernels: tuple[Kernel, ...] = getattr(op, direction)
        count = sum(self._launches(kernel, direction) for kernel in kernels)
        return min(1, count) if self.system.kernels.compiled else count

    def loops_s(self, op: Op, direction: Direction) -> float:
        """Seconds that the host needs to issue the kernels of a group after its first. After each
        weight gradient, autograd calls a hook that takes as long as a launch."""
        if self.system.kernels.compiled:
            return 0.0
        kernels: tuple[Kernel, ...] = getattr(op, direction)
        more = sum(
            (kernel.batch - 1) * self._launches(kernel, direction)
            for kernel in kernels
            if isinstance(kernel, Gemm | Elementwise)
        )
        hook_s = self.stack.host_launch_s if direction == "backward_weight" else 0.0
        return more * (self.common.grouped_gemm_s + hook_s)

    def _launches(self, kernel: Kernel, direction: Direction) -> int:
        if isinstance(kernel, Named):
            rates = self.calibration.kernels.byte_rates(kernel.operator, kernel.implementation)
            return rates.forward_launches if direction == "forward" else rates.backward_launches
        dropout = self.workload.model.drops_attention
        return launches(kernel, forward=direction == "forward", dropout=dropout)

    def kernel_s(self, kernel: Kernel, direction: Direction) -> float:
        """Seconds of one kernel: its busy seconds x scales + the device's gaps between kernels."""
        self.require_rates()
        key = (kernel, direction)
        if key not in self._kernels:
            match kernel:
                case Gemm():
                    busy = self._grouped_s(self._tiled(kernel, direction), direction)
                case Elementwise():
                    busy = self._memory_s(kernel.hbm_bytes)
                case Named():
                    busy = self._named_s(kernel, direction)
                case Attention():
                    busy = self._attention_s(kernel, direction)
            groups = kernel.batch if isinstance(kernel, Gemm | Elementwise) else 1
            gaps = groups * self._launches(kernel, direction) * self.stack.gap_s
            user = self.system.scales
            scale = self.stack.kernel_scale * self.network.kernel_scale * user.kernels
            scale *= user.attention if isinstance(kernel, Attention) else 1.0
            self._kernels[key] = float(busy * scale + gaps)
        return self._kernels[key]

    @cached_property
    def _rounds(self) -> bool:
        return self.cluster.generation != "cpu"

    def _tiled(self, kernel: Gemm, direction: Direction) -> Gemm:
        if not self._rounds:
            return kernel
        weight = direction == "backward_weight"
        return tiles.tiled(kernel, self._operand_bytes(kernel), weight_gradient=weight)

    def _head_dims(self, kernel: Attention) -> tuple[int, int]:
        multiple = tiles.HEAD_DIM_MULTIPLE if self._rounds else 1
        return tiles.rounded(kernel.head_dim, multiple), tiles.rounded(kernel.values, multiple)

    def _least_s(self, kernel: Attention, gemm: tuple[int, int, int, int]) -> float:
        """A lower bound of the seconds of a GEMM (m, n, k, batch) in unfused attention: the time
        without tensor cores if head dimensions are unaligned in 16 bits, otherwise 0."""
        width = self.workload.element_bytes
        half = self._rounds and width == kernel_seconds.REFERENCE_ELEMENT_BYTES
        if not half or self._aligned(kernel):
            return 0.0
        return float(formulas.gemm_flop(*gemm)) / (
            self.cluster.peak_flop_per_s * tiles.UNALIGNED_SHARE
        )

    def _aligned(self, kernel: Attention) -> bool:
        width = self.workload.element_bytes
        return all(tiles.is_aligned(dim, width) for dim in (kernel.head_dim, kernel.values))

    def _pad_s(self, kernel: Attention) -> Quantity:
        """Seconds of the copies that pad queries, keys, values and output (in the backward, their
        gradients) to an aligned head dimension."""
        if not self._rounds or self._aligned(kernel):
            return 0.0
        rows = 2 * (kernel.q_rows * kernel.heads + kernel.kv_rows * kernel.kv_heads) * kernel.batch
        return self._memory_s(rows * sum(self._head_dims(kernel)) * self.workload.element_bytes)

    def _operand_bytes(self, kernel: Gemm) -> int:
        """Bytes per element of a GEMM's operands, rounded up."""
        narrow = self.recipe if kernel.narrow else None
        return ceil(narrow.bits / 8) if narrow else self.workload.element_bytes

    def _gemm_s(self, kernel: Gemm) -> Quantity:
        """Busy seconds of a GEMM. Quantised operands are read in their own width and multiplied at
        the recipe's speed, but a tile's prologue and the write of the result take as long as in 16
        bits."""
        shape = (kernel.m, kernel.n, kernel.k, kernel.batch)
        if not kernel.narrow or self.recipe is None:
            return formulas.gemm_s(*shape, self.workload.element_bytes, self._device, self.gpu)
        speedup, e = self.recipe.gemm[self.cluster.generation].value, self._operand_bytes(kernel)
        device = replace(self._device, peak_flop_per_s=self._device.peak_flop_per_s * speedup)
        operands = e * (kernel.m + kernel.n) * kernel.k
        result = self.workload.element_bytes * kernel.m * kernel.n
        gpu = replace(self.gpu, gemm_half_k=self.gpu.gemm_half_k * speedup)
        busy = formulas.gemm_s(*shape, e, device, gpu)
        return max(busy, self._memory_s(kernel.batch * (operands + result)))

    def _grouped_s(self, kernel: Gemm, direction: Direction) -> Quantity:
        """Busy seconds of a GEMM, or of a grouped GEMM, which runs one kernel per group. Outside
        CUDA graphs, these kernels take at least as long as the host needs to issue them. A grouped
        weight gradient takes at least the time to move its operands and its sums."""
        busy = self._gemm_s(kernel)
        if kernel.batch == 1:
            return busy
        issued = not captures_experts(self.system.kernels, self.workload)
        paced = issued * kernel.batch * max(0.0, self.common.grouped_gemm_s - self.stack.gap_s)
        if direction != "backward_weight":
            return max(busy, paced)
        e, sums = self._operand_bytes(kernel), 2 * self.system.states.grad_bytes
        rows = e * (kernel.m + kernel.n) * kernel.k
        moved = self._memory_s(kernel.batch * (rows + sums * kernel.m * kernel.n))
        return max(busy, paced, moved)

    def _named_s(self, kernel: Named, direction: Direction) -> float:
        """Busy seconds of a named operator: its bytes at the published HBM rate."""
        rates = self.calibration.kernels.byte_rates(kernel.operator, kernel.implementation)
        nbytes = rates.forward_bytes if direction == "forward" else rates.backward_bytes
        moved = kernel.elements * nbytes * kernel.element_bytes
        rate = float(self._published_device.hbm_bytes_per_s)
        return moved / kernel_seconds.REFERENCE_ELEMENT_BYTES / rate

    def _memory_s(self, nbytes: float) -> Quantity:
        return formulas.memory_s(nbytes, self.cluster.hbm_bytes_per_s, self.gpu)

    def _attention_s(self, kernel: Attention, direction: Direction) -> Quantity:
        """Busy seconds of attention, from the published rates of the kernel that runs."""
        forward = direction == "forward"
        if not kernel.fused:
            if self.system.kernels.eager_operators:
                return self._eager_attention_s(kernel, forward)
            return self._unfused_attention_s(kernel, forward)
        head_dim, v_dim = self._head_dims(kernel)
        seconds = kernel_seconds.attention_s(
            self._backend_rates,
            self._device,
            backward=not forward,
            heads=kernel.batch * kernel.documents * kernel.heads,
            head_dim=head_dim,
            v_dim=v_dim,
            q_rows=kernel.q_rows / kernel.documents,
            pairs=kernel.pairs / kernel.documents,
        )
        return seconds + self._pad_s(kernel)

    @cached_property
    def _published_device(self) -> Device:
        """The GPU with the published share of its HBM rate (config/kernels)."""
        rates = self.calibration.kernels.generation(self.cluster.generation)
        return Device(
            peak_flop_per_s=self.peak_flop_per_s,
            hbm_bytes_per_s=self.cluster.hbm_bytes_per_s * rates.hbm.value,
            sm_count=rates.sm_count,
            balance=self.balance,
        )

    @cached_property
    def _device(self) -> Device:
        """The GPU with the fitted share of its HBM rate (config/calibration.yaml)."""
        hbm_bytes_per_s = self.cluster.hbm_bytes_per_s * self.gpu.hbm_efficiency
        return replace(self._published_device, hbm_bytes_per_s=hbm_bytes_per_s)

    @cached_property
    def _backend_rates(self) -> AttentionRates:
        return self.calibration.kernels.attention(self.cluster.generation, self.attention)

    def _unfused_attention_s(self, kernel: Attention, forward: bool) -> Quantity:
        """Busy seconds of unfused attention on the full score matrix, without causal savings: two
        batched GEMMs (four in the backward), and passes of softmax and dropout over the matrix."""
        q, kv = kernel.q_rows, kernel.kv_rows
        many = kernel.batch * kernel.heads

        def pair_s(d: int, v: int) -> float:
            shapes = ((q, kv, d, many), (q, v, kv, many))
            return fsum(
                max(float(self._gemm_s(Gemm(*g))), self._least_s(kernel, g)) for g in shapes
            )

        head_dim, v_dim = self._head_dims(kernel)
        passes = formulas.UNFUSED_FORWARD_PASSES if forward else formulas.UNFUSED_BACKWARD_PASSES
        dropout = self.workload.model.drops_attention
        passes += formulas.DROPOUT_PASSES if dropout else 0.0
        scores = self._memory_s(passes * (many * q * kv) * self.workload.element_bytes)
        if forward:
            return pair_s(head_dim, v_dim) + scores
        return pair_s(head_dim, head_dim) + pair_s(v_dim, v_dim) + scores

    def _eager_attention_s(self, kernel: Attention, forward: bool) -> Quantity:
        """Busy seconds of unfused attention with eager torch operators on the full score matrix,
        from published rates: GEMMs (in the backward one for scores and three for rows), and passes
        of softmax and dropout over the matrix."""
        q, kv, (d, v) = kernel.q_rows, kernel.kv_rows, self._head_dims(kernel)
        many = kernel.batch * kernel.heads
        kernels, device = self.calibration.kernels, self._published_device
        rates = kernels.generation(self.cluster.generation).gemm
        width = self.workload.element_bytes
        rows = [v] if forward else [v, d, d]
        shapes = [(q, kv, d if forward else v, many), *((q, n, kv, many) for n in rows)]
        gemms = fsum(
            max(
                float(kernel_seconds.gemm_s(rates, device, *shape, element_bytes=width)),
                self._least_s(kernel, shape),
            )
            for shape in shapes
        )
        passes = kernel_seconds.unfused_passes(
            kernels.operators.unfused_attention, backward=not forward, masked=True
        ) + (formulas.DROPOUT_PASSES if self.workload.model.drops_attention else 0.0)
        return gemms + passes * many * q * kv * width / device.hbm_bytes_per_s

    def op_s(self, op: Op, direction: Direction, rows_fraction: float = 1.0) -> float:
        """Seconds of an operator's kernels in a direction, for a fraction of its rows."""
        key = (id(op), direction, rows_fraction)
        if key not in self._ops:  # a stored op keeps its id
            kernels: tuple[Kernel, ...] = getattr(op, direction)
            parts = (part_of(kernel, direction, rows_fraction) for kernel in kernels)
            self._ops[key] = (op, fsum(self.kernel_s(part, direction) for part in parts))
        return self._ops[key][1]


def part_of(kernel: Kernel, direction: Direction, rows_fraction: float) -> Kernel:
    """The kernel for a fraction of its rows. A weight gradient sums over its rows (k). Attention
    needs all rows, so it gets a fraction of its heads."""
    if rows_fraction == 1.0 or (isinstance(kernel, Elementwise) and kernel.of_weights):
        return kernel
    match kernel:
        case Gemm(m=m, k=k):
            weight = direction == "backward_weight"
            some = max(1, round((k if weight else m) * rows_fraction))
            return replace(kernel, k=some) if weight else replace(kernel, m=some)
        case Elementwise(hbm_bytes=nbytes):
            return replace(kernel, hbm_bytes=round(nbytes * rows_fraction))
        case Named(elements=elements):
            return replace(kernel, elements=round(elements * rows_fraction))
        case Attention():
            heads, keys = (round(n * rows_fraction) for n in (kernel.heads, kernel.kv_heads))
            return replace(kernel, heads=heads, kv_heads=max(1, keys))

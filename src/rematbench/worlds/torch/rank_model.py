"""One rank's model: its chunks, their parameters, and tensors and sizes for its operators."""

from collections.abc import Callable
from functools import cached_property, partial
from itertools import accumulate
from math import gcd

import torch
from torch import Tensor

from rematbench.costs.operators.launches import COUNTS
from rematbench.costs.operators.ops import Activation
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit
from rematbench.engine.program.action import Action
from rematbench.engine.program.storage import SHARE, ModelPart
from rematbench.inputs.shapes import Shapes, shapes
from rematbench.plan import VOCABULARY, Plan
from rematbench.problem import Problem
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch.arithmetic import rope_tables, wide
from rematbench.worlds.torch.attention_backends import Shape
from rematbench.worlds.torch.batch import MicroBatch, positions, slices
from rematbench.worlds.torch.draws import Draws
from rematbench.worlds.torch.groups import Coordinates, ExpertPlace, Group, expert_place, state_rank
from rematbench.worlds.torch.heads import Heads
from rematbench.worlds.torch.parameters import (
    HEAD_NORMS,
    Owner,
    Parameter,
    ParameterSpec,
    build,
    full_weight,
    unit_specs,
)
from rematbench.worlds.torch.piece_states import Pieces
from rematbench.worlds.torch.unit_states import Sharing, UnitStates, share

Draw = Callable[[ParameterSpec], Tensor | None]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


WIDE = ("lse", "permuted_probs", "dispatched_probs", "expert_probs")
SAVED = {"loss": "loss_saved", "predict_loss": "predict_loss_saved"}
OF_BYTES = ("router_scores", "permutation")
"""Tensors whose rows are bytes of several fields with different types (`experts.py`)."""


class NotExecutable(ValueError):
    """The torch runtime cannot execute a plan; the message names what the runtime lacks."""


def require_executable(problem: Problem, plan: Plan) -> None:
    """Raise NotExecutable, with every reason, if the runtime does not execute the plan."""
    if found := refusals(problem, plan):
        raise NotExecutable(f"the torch runtime does not execute {', '.join(found)}")


class RankModel:
    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        place: Coordinates,
        device: torch.device,
        seed: int,
        *,
        threads: int = 1,
        device_weights: bool = False,
        parameters: dict[str, Parameter] | None = None,
    ) -> None:
        """Make the parameters. `threads` threads draw the weights; with `device_weights` the device
        draws them, in a tenth of the time and with different bits. `parameters`: parameters of
        another model of the same kind on this device, which both models then share."""
        self.problem, self.place, self.device = problem, place, device
        self.kind = problem.workload.model
        self.dtype = DTYPES[problem.workload.precision]
        lay, stage = problem.layout, place.pp
        self.slice_ends = (0, *accumulate(plan.slices)) if len(plan.slices) > 1 else ()
        self.update_in_backward = plan.state("optimizer").update == "backward"
        self.optimizer_on_host = plan.state("optimizer").home == "host"
        self.chunks = [ChunkOps.of_plan(problem, plan, stage, c, plan.held) for c in range(lay.vpp)]
        self.of_heads = next((run for run in plan.mini_sequences if run.of == "heads"), None)
        self.shares = plan.schedule in VOCABULARY
        self.looked_up: list[Tensor] = []
        """The rows of the input table by micro-batch, if stages share a vocabulary."""
        self.input_gradients: dict[int, Tensor] = {}
        self.units = [self._by_prefix(chunk) for chunk in self.chunks]
        order = problem.system.parallel.rank_order
        self.sharing = Sharing.of(plan, lay, state_rank(lay, order, place))
        self.unit_states: list[dict[str, UnitStates]] = [{} for _ in self.chunks]
        """The states that are kept by unit, of each chunk by the unit's prefix."""
        self.columns: Group | None = None
        """The ranks that split the hidden columns, if several do (the executor sets it)."""
        self.parameters = dict(parameters or {})
        draw: Draw = lambda spec: None  # noqa: E731  # then `build` draws the weight
        if device_weights:
            draw = partial(full_weight, seed=seed, device=device)
        elif threads > 1 and not parameters:
            draw = Draws(self._specs(), seed, threads).take
        self.local = [
            {unit.prefix: self._build(unit, seed, draw, states) for unit in units.values()}
            for units, states in zip(self.units, self.unit_states, strict=True)
        ]
        self.pieces = self._cut(plan)
        where = positions(lay, place, problem.workload.seq_len)
        self.where = where.repeat(lay.micro_batch).to(device)
        turned = self.kind.latent.rope if self.kind.latent else self.kind.head_dim
        self.cos, self.sin = rope_tables(self.where, turned, self.dtype)
        self.chosen = self._chosen()
        self.slices = slices(lay, place)
        self.scales: dict[tuple[int, int, str, str], float] = {}
        """The scales of quantised tensors with one scale, by micro-batch, chunk, unit and name."""
        self.batches: list[MicroBatch] = []
        self.flop = 0.0
        """FLOPs of every kernel that has run, from the shapes that it ran with."""

    def _by_prefix(self, chunk: ChunkOps) -> dict[ModelPart, Unit]:
        found = {unit.prefix: unit for unit in chunk.units}
        if self.shares:
            found[SHARE] = Unit(SHARE, self.problem.shared.share, 0, -1, 0, 0)
        return found

    def _cut(self, plan: Plan) -> Pieces | None:
        optimizer = plan.state("optimizer")
        if optimizer.pieces is None or optimizer.home == "device":
            return None
        parameters = list(self.parameters.values())
        return Pieces(
            optimizer.cut(sum(parameter.stop - parameter.start for parameter in parameters)),
            parameters,
            gradients_on_host=bool(self.sharing and self.sharing.gradients_on_host),
            weights_on_host=bool(self.sharing and self.sharing.weights_on_host),
        )

    def _locals(self, unit: Unit) -> dict[str, ParameterSpec]:
        of_unit = unit.layer, self._vocab, self.held_experts
        specs = unit_specs(self.kind, unit.table.part, *of_unit, self.problem.workload)
        if unit.prefix == SHARE:
            specs |= unit_specs(self.kind, "embedding", *of_unit, self.problem.workload)
            specs = {local: spec for local, spec in specs.items() if spec.rows}
        both = self.problem.layout.tp_columns > 1
        return _cut_both_ways(specs, self.kind.hidden) if both else specs

    @property
    def _vocab(self) -> int:
        lay = self.problem.layout
        parts = lay.tp * (lay.pp if self.shares else 1)
        return self.problem.system.padded_vocab(self.kind.vocab, parts)

    def _specs(self) -> list[ParameterSpec]:
        units = [unit for units in self.units for unit in units.values()]
        return list({s.name: s for unit in units for s in self._locals(unit).values()}.values())

    def _build(
        self, unit: Unit, seed: int, draw: Draw, states: dict[str, UnitStates]
    ) -> dict[str, Parameter]:
        """A unit's parameters by local name. Those that no earlier unit has are made here; if
        states are kept by unit, `states` gets the unit's states."""
        lay = self.problem.layout
        named = self._locals(unit)
        fresh = [spec for spec in named.values() if spec.name not in self.parameters]
        ranges = self.sharing.ranges(fresh, lay) if self.sharing else {}
        for spec in fresh:
            self.parameters[spec.name] = build(
                spec,
                self._owner(spec)._replace(span=ranges.get(spec.name)),
                seed,
                self.dtype,
                self.device,
                gradients=not self.update_in_backward and not self.sharing,
                full=draw(spec),
                on_host=self.optimizer_on_host,
            )
        if self.sharing and fresh:
            states[unit.prefix] = share(self.sharing, [self.parameters[s.name] for s in fresh])
        return {local: self.parameters[spec.name] for local, spec in named.items()}

    def _owner(self, spec: ParameterSpec) -> Owner:
        """This rank's part of a parameter. ZeRO shards an expert's states over the ranks that hold
        the same part of the expert."""
        lay, order = self.problem.layout, self.problem.system.parallel.rank_order
        rank, parts, peer, peers = self.tp_rank, lay.tp, state_rank(lay, order, self.place), 1
        if self.shares and spec.rows:
            rank, parts = self.place.pp, lay.pp
        if spec.expert:
            rank, parts, peer = self.folded.etp, lay.expert_tp, self.folded.edp
        if lay.zero_stage >= 1:
            peers = lay.expert_dp if spec.expert else lay.state_shards
        return Owner(
            tp_rank=rank,
            tp=parts,
            state_rank=peer if peers > 1 else 0,
            state_shards=peers,
            column=self.column,
            columns=lay.tp_columns,
        )

    @property
    def tp_rank(self) -> int:
        """This rank's index among the ranks that split heads and the columns of an MLP."""
        return self.place.tp // self.problem.layout.tp_columns

    @property
    def column(self) -> int:
        """This rank's index among the ranks that split the hidden columns."""
        return self.place.tp % self.problem.layout.tp_columns

    @cached_property
    def folded(self) -> ExpertPlace:
        """This rank's coordinates in the groups over which experts are spread."""
        return expert_place(
            self.problem.layout, self.problem.system.parallel.rank_order, self.place
        )

    @cached_property
    def held_experts(self) -> range:
        if self.kind.experts is None:
            return range(0)
        count = self.kind.experts.count // self.problem.layout.ep
        return range(self.folded.ep * count, (self.folded.ep + 1) * count)

    def _chosen(self) -> Tensor:
        """The experts of each token of this rank's shard, rows x active experts; empty without
        experts. The token's position determines them, so they are the same in every layout and
        every expert receives equally many tokens of every rank (`refusals.uneven_experts`)."""
        given, rows = self.kind.experts, self.shapes.shard_tokens
        if given is None:
            return self.where[:0]
        first = self.place.tp * rows if self.problem.layout.sequence_parallel else 0
        where = self.where[first : first + rows, None] * given.active
        return (where + torch.arange(given.active, device=self.device)) % given.count

    @cached_property
    def shapes(self) -> Shapes:
        return shapes(self.problem.workload, self.problem.layout, self.problem.system)

    def heads(self, action: Action) -> Heads | None:
        """The piece of heads on which an action works; None if it works on rows."""
        run = self.of_heads
        if run is None or action.op not in run.ops or action.part.letter != "L":
            return None
        keys, ranks = gcd(run.count, self.attention.kv_heads), self.problem.layout.ulysses
        return Heads(round(action.rows.offset * run.count), run.count, keys, ranks)

    @property
    def vocab_start(self) -> int:
        """The first token of this rank's vocabulary shard."""
        if self.shares:
            return self.place.pp * (self._vocab // self.problem.layout.pp)
        return self.tp_rank * self.shapes.vocab

    @cached_property
    def attention(self) -> Shape:
        """The shape of one rank's attention; under Ulysses whole sequences with a part of the
        heads."""
        s, ranks = self.shapes, self.problem.layout.ulysses
        rows = ranks * s.tokens // s.micro_batch
        kv_heads, dims = max(1, s.kv_heads // ranks), (self.kind.head_dim, self.kind.v_dim)
        return Shape(s.micro_batch, rows, s.heads // ranks, kv_heads, *dims)

    def dtype_of(self, tensor: Activation) -> torch.dtype:
        if tensor.name in SAVED.values() and self.problem.system.loss.logits_fp32:
            return wide(self.dtype)
        if tensor.name in OF_BYTES or tensor.copy_of or tensor.name.endswith("_mask"):
            return torch.uint8
        if tensor.name in (COUNTS, "memory_rows"):
            return torch.int64
        return wide(self.dtype) if tensor.name in WIDE else self.dtype

    def host_states(self) -> list[Tensor]:
        found = [t for p in self.parameters.values() for t in p.host_tensors()]
        found += self.pieces.at_home(on_host=True) if self.pieces else []
        return found + [t for states in self.every_unit() for t in states.at_home(on_host=True)]

    def every_unit(self) -> list[UnitStates]:
        return [states for chunk in self.unit_states for states in chunk.values()]

    def states(self) -> list[Tensor]:
        found = [t for p in self.parameters.values() for t in p.tensors()]
        found += self.pieces.at_home(on_host=False) if self.pieces else []
        found += [t for states in self.every_unit() for t in states.at_home(on_host=False)]
        found += [t for b in self.batches for t in (b.ids, b.labels, *b.ahead)]
        return [*found, self.where, self.chosen, self.cos, self.sin]

    def unit_parameters(self, chunk: int, prefix: ModelPart) -> list[Parameter]:
        """The parameters whose gradients are complete after a unit's backward. A parameter that
        several units share (the embedding's, with a projection or a prediction) belongs to the
        first of them, whose backward is the last. The same holds for weights that layers share."""
        units, local = [*self.units[chunk]], self.local[chunk]
        layer = self.units[chunk][prefix].layer
        if self.kind.owner(layer) != layer:
            return []
        before = units[: units.index(prefix)]
        shared = {p.spec.name for unit in before for p in local[unit].values()}
        if self.kind.memory_of(layer) == "borrows":
            shared.add(local[prefix]["memory_values"].spec.name)
        return [p for p in local[prefix].values() if p.spec.name not in shared]

    @property
    def sides(self) -> dict[str, slice]:
        """The columns of the head's input that each projection reads, if the input has the columns
        of the decoder and of a prediction; otherwise empty."""
        hidden = self.kind.hidden
        both = {"lm_head": slice(0, hidden), "predict_head": slice(hidden, 2 * hidden)}
        return both if self.kind.mtp_layers else {}


def _cut_both_ways(specs: dict[str, ParameterSpec], hidden: int) -> dict[str, ParameterSpec]:
    """The specs with `columns` set, for ranks that split a second dimension: the dimension of a
    matrix that tensor parallelism leaves whole, and that of a vector over the hidden columns."""
    found: dict[str, ParameterSpec] = {}
    inner: int | None
    for local, spec in specs.items():
        inner = 1 if spec.split is None else 1 - spec.split
        if len(spec.shape) == 1:
            of_hidden = spec.shape[0] == hidden and spec.split is None
            inner = 0 if of_hidden and local.removesuffix(".bias") not in HEAD_NORMS else None
        found[local] = spec._replace(columns=inner)
    return found

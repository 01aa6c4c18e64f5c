"""What has no meaning or no kernel is refused by name, and not by an error of torch's."""

import dataclasses

import pytest
import torch
from msgspec.structs import replace

from rematbench.inputs.layout import LayoutError
from rematbench.workload import Workload
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.case import NotFinite, failure
from rematbench.worlds.torch.groups import Coordinates
from rematbench.worlds.torch.rank_model import NotExecutable, require_executable
from tests.worlds.torch import cases

CPU = torch.device("cpu")


def test_rotary_positions_turn_pairs_of_columns() -> None:
    given = cases.tiny("one")
    odd = replace(given.workload.model, head_dim=15)
    turned = dataclasses.replace(given, workload=replace(given.workload, model=odd))
    with pytest.raises(NotExecutable, match="rotary positions with an odd head_dim"):
        require_executable(turned, turned.base_plan)
    learned = replace(odd, position="learned")
    plain = dataclasses.replace(given, workload=replace(given.workload, model=learned))
    require_executable(plain, plain.base_plan)


def test_no_world_knows_positions_past_those_learned() -> None:
    given = cases.tiny("one")
    seq_len = given.workload.seq_len
    model = replace(given.workload.model, position="learned", max_positions=seq_len - 1)
    with pytest.raises(LayoutError, match=f"exceeds the {seq_len - 1} learned positions"):
        dataclasses.replace(given, workload=Workload(model=model, seq_len=seq_len))


def test_a_batch_without_labels_that_count_has_no_loss() -> None:
    given = cases.tiny("one")
    lay = given.layout
    batch = make_batch(given.workload, lay.global_batch, 7, 0, ignored=1.0)
    with pytest.raises(NotFinite, match="every label of the batch is ignored") as told:
        micro_batches(batch, lay, Coordinates(tp=0, cp=0, dp=0, pp=0), CPU)
    assert failure(told.value)[0] == "nan"

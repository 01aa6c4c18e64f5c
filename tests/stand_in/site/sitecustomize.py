"""What every Python process on the stand-in starts with: objects that ranks exchange go through the
store, as the stand-in of NCCL sends nothing, and DeepSpeed does not hold its ranks' numbers against
each other."""

import importlib.abc
import importlib.machinery
import importlib.util
import pickle
import sys
from types import ModuleType
from typing import Any

CHECKS = "deepspeed.runtime.zero.utils"
CALLS: dict[str, int] = {}


def _everyones(mine: object, group: Any) -> list[Any]:
    """What each rank of a group gives, in rank order."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    name = "-".join(map(str, ranks))
    CALLS[name] = CALLS.get(name, 0) + 1
    store = distributed_c10d._get_default_store()
    key = f"stand-in/{name}/{CALLS[name]}"
    store.set(f"{key}/{dist.get_rank()}", pickle.dumps(mine))
    return [pickle.loads(store.get(f"{key}/{rank}")) for rank in ranks]


def _all_gather_object(into: list[Any], mine: object, group: Any = None) -> None:
    into[:] = _everyones(mine, group)


def _broadcast_object_list(
    values: list[Any], src: int = 0, group: Any = None, device: object = None
) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    values[:] = _everyones(list(values), group)[ranks.index(src)]


def _exchange(module: ModuleType) -> None:
    module.all_gather_object = _all_gather_object  # type: ignore[attr-defined]
    module.broadcast_object_list = _broadcast_object_list  # type: ignore[attr-defined]


def _no_checks(module: ModuleType) -> None:
    for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
        setattr(module, name, lambda numbers: None)


AFTER = {"torch.distributed.distributed_c10d": _exchange, CHECKS: _no_checks}


class _Importer(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it is there."""

    def __init__(self) -> None:
        self.finding = False

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER or self.finding:
            return None
        self.finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.finding = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def changed(module: ModuleType) -> None:
            run(module)
            AFTER[name](module)

        loader.exec_module = changed
        return spec


sys.meta_path.insert(0, _Importer())

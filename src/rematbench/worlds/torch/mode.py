"""A dispatch mode that does not import torch's compiler."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base class of the dispatch modes here. A plain TorchDispatchMode imports `torch._dynamo`
    at its first operator, to exempt the mode from a compiler that nothing calls; the import takes
    two CPU seconds of every rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Override torch's hook for that exemption (`torch.utils._python_dispatch`)."""
        return False

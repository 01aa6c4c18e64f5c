"""A dispatch mode that leaves torch's compiler alone."""

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a mode here inherits from: its first operator would import `torch._dynamo`, to exempt
    the mode from a compiler that nothing calls: two CPU seconds of every rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's name for that exemption, to be overridden (`torch.utils._python_dispatch`)."""
        return False

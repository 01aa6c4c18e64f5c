"""Host and device apart on one CPU: what is asked, moved, mixed, and that nothing of it stays."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed", reason="deepspeed is installed by ./bench test")

from baselines.common.meter import Meter
from baselines.deepspeed.places import DEVICE, HOST, Accelerator, moves, separate_places

NAMES = ("to", "cpu", "device")


@pytest.fixture
def places() -> Iterator[object]:
    with separate_places(real=True) as on_host:
        yield on_host


class Twice(torch.autograd.Function):
    """Moves its gradient to the host and back, as DeepSpeed's functions do in a backward."""

    seen: tuple[torch.device, ...] = ()

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        there = grads[0].cpu()
        back = there.to(grads[0].device)
        Twice.seen = (grads[0].device, there.device, back.device)
        return 2 * back


@pytest.mark.usefixtures("places")
def test_a_tensor_is_where_it_was_asked_for_or_where_its_operands_are() -> None:
    device = torch.ones(4, device="cpu:0")
    host = torch.ones(4)
    assert (device.device, host.device) == (DEVICE, HOST)
    assert (2 * device).device == torch.zeros_like(device).device == DEVICE
    assert device[1:].view(-1).device == DEVICE
    assert torch.zeros_like(device, device="cpu").device == HOST
    assert torch.tensor([1.0]).device == HOST
    assert torch.tensor([1.0], device=DEVICE).device == DEVICE
    assert host.double().clone().device == HOST


@pytest.mark.usefixtures("places")
def test_moving_copies_and_staying_does_not() -> None:
    device = torch.arange(4.0, device=DEVICE)
    there = device.to("cpu", torch.bfloat16)
    assert (there.device, there.dtype) == (HOST, torch.bfloat16)
    back = there.to(DEVICE)
    assert back.tolist() == device.tolist()
    assert device.to(DEVICE) is device
    assert there.cpu() is there
    addresses = {x.untyped_storage().data_ptr() for x in (device, there, back, device.cpu())}
    assert len(addresses) == 4


@pytest.mark.usefixtures("places")
def test_an_operator_on_both_is_an_error_but_a_copy() -> None:
    device, host = torch.ones(4, device=DEVICE), torch.zeros(4)
    with pytest.raises(RuntimeError, match="operands on the host and on the device"):
        device + host
    host.copy_(device)
    assert host.sum() == 4
    assert (device * torch.tensor(2.0)).device == DEVICE  # a number of the host's is no operand


@pytest.mark.usefixtures("places")
def test_a_backward_knows_places_too() -> None:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    Twice.apply(x).sum().backward()
    assert Twice.seen == (DEVICE, HOST, DEVICE)
    assert x.grad.device == DEVICE


def test_bytes_are_counted_where_they_are() -> None:
    with separate_places(real=True) as on_host:
        meter = Meter(on_host)
        kept = [torch.ones(8, device=DEVICE), torch.ones(2)]
        assert meter.homes(kept) == (32, 8)
        with meter:
            device = torch.ones(16, device=DEVICE)
            host = device.cpu()
            del device
            again = host.to(DEVICE)
        assert (meter.device_bytes, meter.host_bytes) == (64, 64)
        assert (meter.device_peak_bytes, meter.host_peak_bytes) == (64, 64)
        del again


def test_nothing_stays_when_it_ends() -> None:
    before = {name: getattr(Tensor, name) for name in NAMES}
    factories, record = torch.zeros, Tensor.record_stream
    with pytest.raises(ZeroDivisionError), separate_places(real=True):
        torch.zeros(1 // (torch.zeros is factories))
    assert {name: getattr(Tensor, name) for name in NAMES} == before
    assert not set(NAMES) & set(vars(Tensor))
    assert (torch.zeros, Tensor.record_stream) == (factories, record)


def test_the_accelerator_is_as_a_gpu_is_to_deepspeed() -> None:
    """Not synchronized with its host, and with streams, so that DeepSpeed goes a GPU's ways."""
    made = Accelerator()
    assert made.device_name(3) == made.current_device_name() == "cpu:0"
    assert not made.is_synchronized_device()
    assert made.Stream().record_event().query()


def test_only_what_moves_something_needs_it() -> None:
    assert not moves({"zero_optimization": {"stage": 3}})
    assert moves({"zero_optimization": {"offload_param": {"device": "cpu"}}})
    assert not moves({"zero_optimization": {"offload_optimizer": {"device": "none"}}})
    assert moves({"activation_checkpointing": {"cpu_checkpointing": True}})

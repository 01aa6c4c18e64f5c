"""The CUDA path without a GPU: torch's CUDA build on libraries that stand in for NVIDIA's.

The libraries keep memory, streams and events and compute nothing, so what is tested is what runs
above them: that every call is one torch accepts on `cuda`, that live bytes equal the ledger's with
torch's own allocators and with ProcessGroupNCCL, what the allocator holds at most, and that ranks
ask NCCL for the same things in the same order.  Losses and gradients mean nothing here, and neither
does any time.  `./bench stand-in` makes the environment and runs these tests.
"""

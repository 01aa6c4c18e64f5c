"""DeepSpeed, the package itself: ZeRO, checkpointing, offloading, Ulysses, tiling."""

"""DeepSpeed itself: ZeRO, checkpointing, offloading, Ulysses, tiling."""

"""worlds/packages/megatron_core"""

"""Megatron-core as plans: its policy, and the tensors that it holds beside the operator table."""

"""Hugging Face Transformers, traced: its own model classes on fake tensors."""

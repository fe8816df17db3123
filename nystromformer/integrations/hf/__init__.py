"""Attention in the models of Hugging Face's Transformers: its interface, their masks, modules, layers and adapters."""

"""Measuring attentions: interleaved times and peak memory, peers included."""

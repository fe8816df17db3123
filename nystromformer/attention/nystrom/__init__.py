"""Nyström attention: the operation and its layers, landmarks, pseudoinverse, the arithmetic of `nystrom-attention`."""

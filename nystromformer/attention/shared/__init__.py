"""What attentions share: checks, masks and precision, packed sequences, softmax in parts, the skip convolution."""

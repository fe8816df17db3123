"""What `nystromformer demo` shows: a real model, time and memory, training on long input, attention maps."""

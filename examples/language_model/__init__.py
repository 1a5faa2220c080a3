"""A small byte-level language model with dynamic-mask attention: its text, model, training and pictures."""

"""Helpers around the attention functions."""

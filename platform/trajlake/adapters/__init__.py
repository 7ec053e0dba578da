"""Adapters: the same draws for training frameworks. Each imports its framework only when it is used."""

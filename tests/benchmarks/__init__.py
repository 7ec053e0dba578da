"""Benchmarks beside peers, in one run: `make bench`, or `python -m tests.benchmarks NAME… [--small] [--json FILE]`."""

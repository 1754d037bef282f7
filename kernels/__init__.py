# SPDX-License-Identifier: Apache-2.0
"""Data movement on one device set: one folder per kernel, the same file names in each.

`api.py` is the public function, `reference.py` plain XLA (the oracle of the tests and the path of
platforms without Pallas for TPU), `kernel.py` the Pallas body, `arg_specs.py` the named shapes
that test and benchmark share, `bench.py` the benchmark.
"""

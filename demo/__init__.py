# SPDX-License-Identifier: Apache-2.0
"""The running pair on one machine: a demo, a server to play with, and the tests' fixture."""

# SPDX-License-Identifier: Apache-2.0
"""Transfer engines: ways to move arrays from one process to another."""

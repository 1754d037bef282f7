# SPDX-License-Identifier: Apache-2.0
"""The main program of every py_test: runs pytest on the files it is given."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Makes the key file of a deployment: `python -m kvferry.keys DIR`; see control/keys.py."""

from kvferry.control.keys import run

if __name__ == "__main__":
    run()

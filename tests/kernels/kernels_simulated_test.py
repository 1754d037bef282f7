# SPDX-License-Identifier: Apache-2.0
"""The Pallas kernels in the TPU simulator: values, untouched pages, races, semaphores."""

from __future__ import annotations

import pytest
from jax.experimental.pallas import tpu as pltpu

from kvferry.kernels.copy_to_host import kernel as copy_to_host_kernel
from kvferry.kernels.multi_layer_copy import kernel as multi_layer_copy_kernel
from kvferry.tests.kernels.kernel_checks import COPY_TO_HOST, MULTI_LAYER_COPY
from kvferry.tests.kernels.simulator import PARAMS, params_id


@pytest.mark.parametrize("params", PARAMS, ids=params_id)
@pytest.mark.parametrize("check", MULTI_LAYER_COPY)
def test_multi_layer_copy(check: str, params: pltpu.InterpretParams) -> None:
    MULTI_LAYER_COPY[check](multi_layer_copy_kernel, params)


@pytest.mark.parametrize("params", PARAMS, ids=params_id)
@pytest.mark.parametrize("check", COPY_TO_HOST)
def test_copy_to_host(check: str, params: pltpu.InterpretParams) -> None:
    COPY_TO_HOST[check](copy_to_host_kernel, params)

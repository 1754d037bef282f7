# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from kvferry.engine.sampling_params import SamplingParams
from kvferry.server.errors import ApiError
from kvferry.server.sampling import sampling_params
from kvferry.server.schemas import GenerateSampling


def _read(raw: str) -> SamplingParams:
    fields = msgspec.json.decode(raw, type=GenerateSampling)
    return sampling_params(
        fields, max_new_tokens=9, min_new_tokens=fields.min_new_tokens, seed=fields.seed
    )


def test_nothing_given_keeps_the_engines_defaults() -> None:
    assert _read("{}") == SamplingParams(max_new_tokens=9)


def test_nulls_are_absent() -> None:
    names = ("temperature", "top_k", "stop", "seed", "ignore_eos", "logit_bias", "min_new_tokens")
    raw = ",".join(f'"{name}":null' for name in names)
    assert _read(f"{{{raw}}}") == SamplingParams(max_new_tokens=9)


def test_every_field_arrives() -> None:
    raw = (
        '{"temperature":0.5,"top_p":0.9,"top_k":4.0,"min_p":0.1,"frequency_penalty":0.25,'
        '"presence_penalty":-0.5,"repetition_penalty":1.5,"stop":["a","b"],"stop_token_ids":[1,2.0],'
        '"ignore_eos":true,"skip_special_tokens":false,"no_stop_trim":true,"logit_bias":{"5":1},'
        '"seed":3.0,"min_new_tokens":2.0,"unknown":1}'
    )
    assert _read(raw) == SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        frequency_penalty=0.25,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        skip_special_tokens=False,
        no_stop_trim=True,
        logit_bias={5: 1.0},
        seed=3,
        min_new_tokens=2,
    )


def test_numbers_that_went_through_a_router() -> None:
    params = _read('{"temperature":0.699999988079071,"top_p":0.8999999761581421,"top_k":0.0}')
    assert params.temperature == pytest.approx(0.7, abs=1e-6)
    assert not params.greedy
    assert _read('{"temperature":0.0}').greedy
    assert _read('{"temperature":9.999999974752427e-7}').greedy


def test_one_stop_string() -> None:
    assert _read('{"stop":"end"}').stop == ("end",)


@pytest.mark.parametrize(
    "raw", ['{"temperature":-1}', '{"top_p":0}', '{"min_p":2}', '{"top_k":-2}']
)
def test_out_of_range_is_400(raw: str) -> None:
    with pytest.raises(ApiError) as caught:
        _read(raw)
    assert caught.value.status == 400
    assert raw.split('"')[1] in caught.value.message

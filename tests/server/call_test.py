# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from kvferry.engine.request import FinishReason, RequestOutput, TokenLogprob
from kvferry.server.call import Call, ClientGoneError, Mailbox
from kvferry.server.errors import ApiError

_T = TypeVar("_T")
Aborts = list[tuple[int, str, int]]


def _output(
    token: int, finish: FinishReason | None = None, count: int = 1, **fields: object
) -> RequestOutput:
    given: dict[str, object] = {
        "request_id": "r",
        "token_ids": (token,),
        "text": chr(token),
        "logprobs": None,
        "prompt_logprobs": None,
        "finish": finish,
        "prompt_tokens": 3,
        "completion_tokens": count,
    }
    return RequestOutput(**(given | fields))  # type: ignore[arg-type]


def _call(aborts: Aborts, sequences: int = 1) -> Call:
    names = [f"r_{i}" for i in range(sequences)]
    return Call(names, [3] * sequences, lambda *a: aborts.append(a), lambda output, result: None)


def _run(body: Callable[[], Awaitable[_T]]) -> _T:
    async def bounded() -> _T:
        return await asyncio.wait_for(_as_coroutine(body()), 20)

    return asyncio.run(bounded())


async def _as_coroutine(awaitable: Awaitable[_T]) -> _T:
    return await awaitable


def test_outputs_add_up() -> None:
    async def body() -> None:
        call = _call([])
        logprob = TokenLogprob(-1.0, 97)
        call.take(0, _output(97, logprobs=(logprob,), prompt_logprobs=(logprob,)))
        assert await call.wait() == [0]
        call.take(0, _output(98, count=2))
        call.take(0, _output(99, FinishReason("length"), 3, cached_tokens=2))
        assert await call.wait() == [0]
        result = call.results[0]
        assert (result.text, result.token_ids, result.completion_tokens) == ("abc", [97, 98, 99], 3)
        assert result.logprobs == [logprob] and list(result.prompt_logprobs) == [logprob]
        assert result.cached_tokens == 2
        assert call.finished

    _run(body)


def test_wait_names_the_sequences_with_news() -> None:
    async def body() -> None:
        call = _call([], 3)
        call.take(2, _output(97))
        call.take(0, _output(97))
        assert await call.wait() == [0, 2]
        call.take(1, _output(97))
        assert await call.wait() == [1]

    _run(body)


def test_a_call_is_exhausted_when_its_end_was_told() -> None:
    async def body() -> None:
        call = _call([])
        call.take(0, _output(97))
        await call.wait()
        call.take(0, _output(98, FinishReason("length"), 2))
        assert call.finished and not call.exhausted
        await call.wait()
        assert call.exhausted

    _run(body)


def test_an_aborted_sequence_fails_the_call_and_takes_the_others_along() -> None:
    async def body() -> None:
        aborts: Aborts = []
        call = _call(aborts, 3)
        call.take(0, _output(97, FinishReason("length")))
        call.take(1, _output(97, FinishReason("abort", message="lost", status=500)))
        with pytest.raises(ApiError, match="lost") as caught:
            await call.wait()
        assert caught.value.status == 500
        assert aborts == [(2, "lost", 500)]

    _run(body)


@pytest.mark.parametrize(("status", "sent"), [(200, 503), (400, 400), (499, 400), (503, 503)])
def test_the_status_of_an_abort(status: int, sent: int) -> None:
    async def body() -> int:
        call = _call([])
        call.take(0, _output(97, FinishReason("abort", status=status)))
        with pytest.raises(ApiError) as caught:
            await call.wait()
        return caught.value.status

    assert _run(body) == sent


def test_fail_aborts_what_runs_and_wakes_the_waiter() -> None:
    async def body() -> None:
        aborts: Aborts = []
        call = _call(aborts, 2)
        call.take(0, _output(97, FinishReason("stop", 5)))
        await call.wait()
        waiter = asyncio.ensure_future(call.wait())
        await asyncio.sleep(0)
        call.fail(ClientGoneError("gone"))
        with pytest.raises(ClientGoneError):
            await waiter
        call.fail(ApiError("a second failure"))
        assert aborts == [(1, "gone", 400)]
        call.take(1, _output(98))
        assert call.results[1].token_ids == []

    _run(body)


def test_fail_after_the_end_does_nothing() -> None:
    async def body() -> None:
        aborts: Aborts = []
        call = _call(aborts)
        call.take(0, _output(97, FinishReason("length")))
        call.fail(ClientGoneError("gone"))
        assert await call.wait() == [0]
        assert aborts == []

    _run(body)


def test_goes_by() -> None:
    async def body() -> None:
        call = _call([], 11)
        assert call.goes_by("r") and call.goes_by("r_1") and call.goes_by("r_10")
        assert not call.goes_by("r_") and not call.goes_by("x") and not call.goes_by("r_11")

    _run(body)


def test_mailbox_keeps_the_order_of_a_thread() -> None:
    async def body() -> None:
        call = _call([])
        mailbox = Mailbox(asyncio.get_running_loop())

        def step_thread() -> None:
            for i in range(500):
                finish = FinishReason("length") if i == 499 else None
                mailbox.post(call, 0, _output(i, finish, i + 1))

        thread = threading.Thread(target=step_thread)
        thread.start()
        while not call.finished:
            await call.wait()
        thread.join()
        assert call.results[0].token_ids == list(range(500))

    _run(body)


def test_mailbox_wakes_the_loop_once_for_many_posts() -> None:
    async def body() -> None:
        call = _call([], 4)
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        for i in range(4):
            mailbox.post(call, i, _output(97))
        assert await call.wait() == [0, 1, 2, 3]

    _run(body)


def test_a_post_after_the_loop_is_closed_is_dropped() -> None:
    async def body() -> tuple[Call, Mailbox]:
        return _call([]), Mailbox(asyncio.get_running_loop())

    call, mailbox = _run(body)
    mailbox.post(call, 0, _output(97))
    assert call.results[0].token_ids == []

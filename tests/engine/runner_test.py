# SPDX-License-Identifier: Apache-2.0
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import Mesh

from kvferry.engine.attention_plan import Family
from kvferry.engine.runner import ModelRunner
from kvferry.engine.runner_options import RunnerOptions, resolve_sizes
from kvferry.engine.sharding import TP_AXIS
from kvferry.engine.step_inputs import Chunk
from kvferry.tests.engine.tiny import tiny_config, tiny_model, tiny_runner

Floats = npt.NDArray[np.float32]

IDS = [int(i) for i in np.random.default_rng(0).integers(0, 250, 23)]
PAGES = [40, 3, 17, 22, 5, 31]


def logits(runner: ModelRunner, *chunks: Chunk) -> Floats:
    """Runs a step and returns a row per chunk."""
    return np.asarray(runner.run(chunks).logits)[: len(chunks)]


def prefill(runner: ModelRunner, ids: Sequence[int], pages: Sequence[int]) -> Floats:
    return logits(runner, Chunk(ids, 0, pages))[0]


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_runner()


@pytest.mark.parametrize("cuts", [[1], [4], [5, 9], [22], [1, 2, 3, 4, 20]])
def test_chunks_equal_one_prefill(runner: ModelRunner, cuts: list[int]) -> None:
    whole = prefill(runner, IDS, PAGES)
    edges = [0, *cuts, len(IDS)]
    for start, end in zip(edges, edges[1:], strict=False):
        last = logits(runner, Chunk(IDS[start:end], start, PAGES[::-1]))[0]
    np.testing.assert_allclose(last, whole, rtol=1e-4, atol=1e-4)


def test_sequences_in_one_step_do_not_see_each_other(runner: ModelRunner) -> None:
    alone = prefill(runner, IDS[:9], [50, 51, 52])
    chunks = [Chunk(IDS[:4], 0, [1]), Chunk(IDS[:9], 0, [6, 7, 8]), Chunk(IDS[9:], 0, PAGES)]
    together = logits(runner, *chunks)
    np.testing.assert_allclose(together[1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_decode_batches_equal_single_steps(runner: ModelRunner, count: int) -> None:
    tables = [[8 * i, 8 * i + 1, 8 * i + 2] for i in range(count)]
    for i, pages in enumerate(tables):
        prefill(runner, IDS[: 5 + i], pages)
    batch = logits(runner, *[Chunk([IDS[i]], 5 + i, pages) for i, pages in enumerate(tables)])
    for i in range(count):
        alone = prefill(runner, [*IDS[: 5 + i], IDS[i]], [60, 61, 62])
        np.testing.assert_allclose(batch[i], alone, rtol=1e-4, atol=1e-4)


def test_device_tokens_replace_those_of_the_chunks(runner: ModelRunner) -> None:
    prefill(runner, IDS[:5], PAGES)
    expected = logits(runner, Chunk([IDS[5]], 5, PAGES))
    tokens = jax.numpy.asarray([IDS[5]], jax.numpy.int32)
    result = runner.run([Chunk([0], 5, PAGES)], token_ids=tokens)
    np.testing.assert_array_equal(np.asarray(result.logits), expected)


def test_steps_update_the_pool_in_place(runner: ModelRunner) -> None:
    addresses = [array.unsafe_buffer_pointer() for array in runner.pool.arrays]
    prefill(runner, IDS, PAGES)
    logits(runner, Chunk([1], len(IDS), PAGES))
    assert [array.unsafe_buffer_pointer() for array in runner.pool.arrays] == addresses


def test_pages_moved_to_another_runner_continue_there(runner: ModelRunner) -> None:
    other = tiny_runner()
    prefill(runner, IDS, PAGES)
    expected = logits(runner, Chunk([1], len(IDS), PAGES))
    other.pool.scatter(runner.pool.gather(PAGES), PAGES[::-1])
    moved = logits(other, Chunk([1], len(IDS), PAGES[::-1]))
    np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_n", [0, 3])
def test_prompt_logprobs_are_those_of_the_logits(runner: ModelRunner, top_n: int) -> None:
    result = runner.run([Chunk(IDS, 0, PAGES)], keep_hidden=True)
    targets = np.array(IDS[1:], np.int32)
    found = runner.prompt_logprobs(result.hidden, targets, top_n)
    for row in (0, 7, len(IDS) - 2):
        scores = prefill(runner, IDS[: row + 1], [1, 2, 4, 6, 7, 8]).astype(np.float64)
        expected = scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
        np.testing.assert_allclose(found.target[row], expected[targets[row]], atol=1e-4)
        if top_n:
            assert found.top is not None
            assert found.top_ids is not None
            best = np.argsort(-expected)[:top_n]
            np.testing.assert_allclose(found.top[row, :top_n], expected[best], atol=1e-4)
            np.testing.assert_array_equal(np.asarray(found.top_ids)[row, :top_n], best)
    assert (found.top is None) == (not top_n)


def test_one_token_prompts_can_keep_hidden_states(runner: ModelRunner) -> None:
    result = runner.run([Chunk(IDS[:1], 0, PAGES)], keep_hidden=True)
    assert result.hidden.shape[0] == runner.sizes.prefill_tokens[0]


def test_serving_after_warm_up_traces_nothing() -> None:
    runner = tiny_runner()
    seen: list[tuple[int, int]] = []
    shapes: set[tuple[int, ...]] = set()
    runner.warm_up(
        lambda done, total, label: seen.append((done, total)),
        copies=("gather", "scatter"),
        on_logits=lambda logits: shapes.add(logits.shape),
    )
    total = seen[-1][1]
    assert seen == [(i, total) for i in range(total + 1)]
    assert shapes == {(3, 288), (1, 288), (4, 288)}
    traces = runner.num_traces
    for count in (1, 5, 23, 32):
        ids = [1] * count
        result = runner.run([Chunk(ids, 0, range(8))], keep_hidden=True)
        for top_n in (0, 20):
            runner.prompt_logprobs(result.hidden, np.array(ids, np.int32), top_n)
        runner.pool.scatter(runner.pool.gather(range(count)), range(count))
    for count in (1, 2, 3, 4):
        runner.run([Chunk([1], 0, [i]) for i in range(count)])
    assert runner.num_traces == traces


def test_without_the_decode_family_single_tokens_run_as_prefill() -> None:
    runner = tiny_runner()
    families: tuple[Family, ...] = ("prefill",)
    runner.warm_up(lambda *_: None, families=families)
    traces = runner.num_traces
    expected = prefill(runner, IDS[:6], PAGES)
    prefill(runner, IDS[:5], PAGES)
    np.testing.assert_allclose(
        logits(runner, Chunk([IDS[5]], 5, PAGES))[0], expected, rtol=1e-4, atol=1e-4
    )
    assert runner.num_traces == traces


def test_tensor_parallel_steps_equal_those_of_one_device() -> None:
    model = tiny_model(num_q_heads=8, num_kv_heads=4, vocab_size=290, qkv_bias=True, o_bias=True)
    single = tiny_runner(model)
    split = tiny_runner(model, mesh=Mesh(np.array(jax.devices()[:2]), (TP_AXIS,)))
    np.testing.assert_allclose(
        prefill(split, IDS, PAGES), prefill(single, IDS, PAGES), rtol=1e-4, atol=1e-4
    )
    step = Chunk([3], len(IDS), PAGES)
    np.testing.assert_allclose(logits(split, step), logits(single, step), rtol=1e-4, atol=1e-4)
    hidden = split.run([Chunk(IDS, 0, PAGES)], keep_hidden=True).hidden
    found = split.prompt_logprobs(hidden, np.array(IDS[1:], np.int32))
    hidden = single.run([Chunk(IDS, 0, PAGES)], keep_hidden=True).hidden
    expected = single.prompt_logprobs(hidden, np.array(IDS[1:], np.int32))
    rows = len(IDS) - 1
    np.testing.assert_allclose(found.target[:rows], expected.target[:rows], atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_narrow_pool_changes_the_answer_a_little(runner: ModelRunner, kv_dtype: str) -> None:
    narrow = tiny_runner(kv_dtype=kv_dtype)
    exact, rounded = prefill(runner, IDS, PAGES), prefill(narrow, IDS, PAGES)
    correlation = np.corrcoef(exact, rounded)[0, 1]
    assert 0.9 < correlation < 1 - 1e-9


def test_a_step_costs_the_same_in_a_large_pool() -> None:
    # Compiler facts instead of times: temporaries that do not grow with the pool, no copy of it.
    temporaries = []
    for num_pages in (64, 4096):
        runner = tiny_runner(num_pages=num_pages)
        runner.run([Chunk([1], 0, [0])])
        runner.run([Chunk([1, 2], 0, [0])])
        pool_bytes = num_pages * runner.pool.page_bytes
        sizes = []
        for compiled in runner.compiled_steps():
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes >= pool_bytes
            shape = f"[{num_pages},{','.join(map(str, runner.pool.layout.page_shape))}]"
            assert not re.search(rf"{re.escape(shape)}\S* copy\(", compiled.as_text())
            sizes.append(memory.temp_size_in_bytes)
        temporaries.append(sizes)
    assert temporaries[0] == temporaries[1]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "a step needs at least one chunk"),
        ([Chunk([1] * 33, 0, range(9))], "1 chunks of 33 tokens together exceed"),
        ([Chunk([1, 2], 0, [i]) for i in range(4)], "4 chunks of 8 tokens together exceed"),
        ([Chunk([1], 0, [i]) for i in range(5)], "or 4 chunks of one token"),
    ],
)
def test_steps_that_fit_no_shape_are_refused(
    runner: ModelRunner, chunks: list[Chunk], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.run(chunks)


def test_wrong_prompt_logprob_requests_are_refused(runner: ModelRunner) -> None:
    hidden = runner.run([Chunk(IDS, 0, PAGES)], keep_hidden=True).hidden
    with pytest.raises(ValueError, match=r"top_n must be in \[0, 20\], got 21"):
        runner.prompt_logprobs(hidden, np.zeros(1, np.int32), 21)
    with pytest.raises(ValueError, match="33 targets for 32 rows"):
        runner.prompt_logprobs(hidden, np.zeros(33, np.int32))


def sizes(**options: Any) -> Any:
    runner_options = RunnerOptions(page_size=4, **options)
    layout = tiny_runner().pool.layout
    return resolve_sizes(runner_options, tiny_config(), layout, jax.local_devices()[0])


def test_sizes_follow_from_model_and_options() -> None:
    found = sizes(max_running_requests=6, chunk_tokens=100, num_pages=99)
    assert (found.max_context, found.max_pages, found.num_pages) == (128, 32, 99)
    assert found.prefill_tokens == (32, 100)
    assert found.decode_batches == (1, 4, 6)
    assert found.prefill_sequences == 6
    assert sizes(chunk_tokens=512, max_context=64).prefill_tokens == (32, 64)
    assert sizes(max_context=1 << 20).max_context == 128
    assert [sizes(max_running_requests=n).decode_batches for n in (1, 2, 16)] == [
        (1,),
        (1, 2),
        (1, 4, 8, 16),
    ]


def test_the_pool_is_no_larger_than_all_requests_can_use() -> None:
    assert sizes(max_running_requests=2).num_pages == 64
    page_bytes = tiny_runner().pool.page_bytes
    assert sizes(kv_memory_bytes=40 * page_bytes + 1).num_pages == 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 31}, r"has 31 pages \(num_pages\), but one sequence of 128 tokens needs 32"),
        ({"kv_memory_bytes": 4096}, "give the pool more memory or pages, or lower the context"),
        ({"chunk_tokens": 0}, "chunk_tokens must be positive, got 0"),
        ({"max_context": -1}, "max_context must be positive, got -1"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes(**options)


def test_a_mesh_without_the_axis_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    with pytest.raises(ValueError, match="the mesh needs an axis 'tp', got"):
        RunnerOptions(mesh=mesh)

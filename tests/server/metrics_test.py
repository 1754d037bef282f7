# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from kvferry.server.metrics import MetricSample
from kvferry.server.service import ServiceHooks
from kvferry.tests.server.running import Running, serving_script
from kvferry.tests.server.scripted import ScriptedScheduler

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def _scrape(running: Running) -> Values:
    answer = running.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def test_answers_are_counted_by_route_and_status() -> None:
    with serving_script(ScriptedScheduler()) as running:
        running.post("/generate", {"text": "abc"})
        running.post("/generate", {})
        running.get("/no/such/place")
        values = _scrape(running)

    def answers(route: str, status: str) -> float:
        return values["kvferry_http_answers_total", (("route", route), ("status", status))]

    assert answers("/generate", "200") == 1
    assert answers("/generate", "400") == 1
    assert answers("other", "404") == 1


def test_latencies_are_observed_once_per_sequence() -> None:
    with serving_script(ScriptedScheduler()) as running:
        params = {"max_new_tokens": 5}
        running.post("/generate", {"text": ["a", "b"], "sampling_params": params})
        running.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
        values = _scrape(running)
    assert values["kvferry_time_to_first_token_seconds_count", ()] == 3
    assert values["kvferry_time_per_output_token_seconds_count", ()] == 2
    assert values["kvferry_sequence_seconds_count", ()] == 3
    assert values["kvferry_time_to_first_token_seconds_sum", ()] > 0


def test_the_schedulers_numbers(plain: Running) -> None:
    values = _scrape(plain)
    assert values["kvferry_kv_pages", ()] == 100
    assert values["kvferry_kv_pages_used", ()] + values["kvferry_kv_pages_free", ()] == 100
    assert values["kvferry_queue_depth", ()] == 0
    assert values["kvferry_requests_finished_total", (("reason", "length"),)] == 0
    assert ("kvferry_generated_tokens_total", ()) in values


def test_samples_of_the_rest_of_the_process() -> None:
    state = {"calls": 0}

    def collect() -> Iterable[MetricSample]:
        state["calls"] += 1
        yield MetricSample("kv_bytes_pulled_total", 10.0 * state["calls"], help="Bytes pulled.")
        yield MetricSample("rooms_open", 2)
        yield MetricSample("transfers_total", 3, {"engine": "jax"})
        yield MetricSample("transfers_total", 4, {"engine": "tcp"})

    with serving_script(ScriptedScheduler(), ServiceHooks(collect=collect)) as running:
        assert _scrape(running)["kvferry_kv_bytes_pulled_total", ()] == 10
        values = _scrape(running)
    assert values["kvferry_kv_bytes_pulled_total", ()] == 20
    assert values["kvferry_rooms_open", ()] == 2
    assert values["kvferry_transfers_total", (("engine", "jax"),)] == 3
    assert values["kvferry_transfers_total", (("engine", "tcp"),)] == 4


def test_two_servers_in_one_process_do_not_share_metrics(plain: Running) -> None:
    plain.post("/generate", {"text": "abc"})
    with serving_script(ScriptedScheduler()) as running:
        assert _scrape(running)["kvferry_sequence_seconds_count", ()] == 0

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.sampling.params import SamplingParams
from kvpool.pool import PoolStats
from scheduler.handle import RequestTimes
from scheduler.observer import RequestReport, StepReport
from scheduler.request import FinishReason, PreemptionReason, Request
from scheduler.stats import SchedulerStats
from server.instruments import Histogram
from server.metrics import Metrics, ModelLabels

MODEL = ModelLabels("tiny", "float32", "cpu", 2048, 16, 100)
REPOSITORY = Path(__file__).resolve().parents[2]


def stats(num_running=0, num_waiting=0, num_referenced=0):
    pool = PoolStats(100, 90 - num_referenced, 10, num_referenced, 3)
    return SchedulerStats(num_running, num_waiting, 5 * num_waiting, 123.0, None, False, None, pool)


def metrics(vllm_names=True, **state):
    instance = Metrics(version="1.2.3", vllm_names=vllm_names)
    instance.attach(MODEL, lambda: stats(**state))
    return instance


def scrape(instance):
    """{(sample name, sorted labels): value}"""
    content, content_type = instance.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def value(instance, name, **labels):
    return scrape(instance)[name, tuple(sorted(labels.items()))]


def request(num_prompt_tokens=10, num_choices=1):
    return Request("r", tuple(range(num_prompt_tokens)), SamplingParams(), max_tokens=8, num_choices=num_choices)


def report(*reasons, times=None, num_output_tokens=5, **kwargs):
    whole = RequestTimes(arrived_s=1.0, scheduled_s=1.5, first_token_s=2.0, last_token_s=4.0, finished_s=4.5)
    asked = request(num_choices=len(reasons), **kwargs)
    return RequestReport(asked, reasons, num_output_tokens, 0, 0, times or whole)


VLLM_NAMES = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
    "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket", "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "iteration_tokens_total_bucket",
]  # fmt: skip


def test_every_vllm_name_is_there_with_its_labels():
    instance = metrics()
    instance.on_request_end(report(FinishReason.STOP))
    samples = scrape(instance)
    for name in VLLM_NAMES:
        labels = [dict(labels) for sample, labels in samples if sample == f"vllm:{name}"]
        assert labels, name
        assert all(label["model_name"] == "tiny" and label["engine"] == "0" for label in labels), name
    assert any(dict(labels).get("num_gpu_blocks") == "100" for name, labels in samples if "cache_config" in name)


def test_the_switch_removes_vllm_names_and_nothing_else():
    with_names, without = scrape(metrics()), scrape(metrics(vllm_names=False))
    assert {key for key in with_names if not key[0].startswith("vllm:")} == set(without)


def test_buckets_are_those_of_the_contract():
    instance = metrics()
    bounds = {}
    for name, labels in scrape(instance):
        if name.startswith("vllm:") and name.endswith("_bucket"):
            bounds.setdefault(name, []).append(dict(labels)["le"])
    ttft = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    token = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
    whole = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
    for name, text in (
        ("time_to_first_token_seconds", ttft),
        ("inter_token_latency_seconds", token),
        ("request_time_per_output_token_seconds", token),
        ("e2e_request_latency_seconds", whole),
        ("request_queue_time_seconds", whole),
        ("request_prefill_time_seconds", whole),
        ("request_decode_time_seconds", whole),
    ):
        found = [float(bound) for bound in bounds[f"vllm:{name}_bucket"]]
        assert found == [*map(float, text.split()), float("inf")], name


def test_own_and_vllm_names_show_the_same_values():
    instance = metrics()
    instance.on_step(StepReport(3, 30, 2, 3, 0.001, 0.2, 0.002, 3, 0))
    instance.on_first_token(request(10), 0.03)
    instance.on_token_gap(0.2, 2)
    instance.on_prefix_lookup(10, 4)
    instance.on_preemption(request(), PreemptionReason.OUTRANKED)
    labels = {"model_name": "tiny", "engine": "0"}
    for own, alias, expected in (
        ("quire_generation_tokens_total", "generation_tokens_total", 3),
        ("quire_prompt_tokens_total", "prompt_tokens_total", 10),
        ("quire_prefix_cache_queried_tokens_total", "prefix_cache_queries_total", 10),
        ("quire_prefix_cache_hit_tokens_total", "prefix_cache_hits_total", 4),
        ("quire_preemptions_total", "num_preemptions_total", 1),
        ("quire_time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum", 0.03),
        ("quire_inter_token_latency_seconds_count", "inter_token_latency_seconds_count", 2),
        ("quire_inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum", 0.2),
        ("quire_step_tokens_sum", "iteration_tokens_total_sum", 32),
    ):
        assert value(instance, own) == value(instance, f"vllm:{alias}", **labels) == pytest.approx(expected), own
    assert value(instance, "quire_step_seconds_sum", phase="engine") == pytest.approx(0.2)


def test_times_of_a_request():
    instance = metrics()
    instance.on_request_end(report(FinishReason.STOP))
    for name, expected in (
        ("request_seconds", 3.5),
        ("request_queue_seconds", 0.5),
        ("request_prefill_seconds", 0.5),
        ("request_decode_seconds", 2.0),
        ("time_per_output_token_seconds", 0.5),
        ("request_output_tokens", 5),
    ):
        assert value(instance, f"quire_{name}_sum") == pytest.approx(expected), name


def test_a_request_that_never_ran_has_no_times_of_running():
    instance = metrics()
    times = RequestTimes(arrived_s=1.0, finished_s=2.0)
    instance.on_request_end(report(FinishReason.CANCELLED, times=times, num_output_tokens=0))
    assert value(instance, "quire_request_seconds_count") == 1
    assert value(instance, "quire_request_queue_seconds_count") == 0
    assert value(instance, "quire_request_decode_seconds_count") == 0
    assert value(instance, "quire_prompt_tokens_total") == 0


def test_a_scored_prompt_counts_its_tokens():
    instance = metrics()
    times = RequestTimes(arrived_s=1.0, scheduled_s=1.2, finished_s=2.0)
    instance.on_request_end(report(FinishReason.LENGTH, times=times, num_output_tokens=0))
    assert value(instance, "quire_prompt_tokens_total") == 10


@pytest.mark.parametrize(
    ("reasons", "own", "vllm"),
    [
        ((FinishReason.STOP,), "stop", "stop"),
        ((FinishReason.LENGTH, FinishReason.STOP), "length", "length"),
        ((FinishReason.CANCELLED, FinishReason.STOP), "cancelled", "abort"),
        ((FinishReason.DEADLINE,), "deadline", "abort"),
        ((FinishReason.STOP, FinishReason.FAILED), "failed", "error"),
    ],
)
def test_a_request_ends_in_one_cell_whatever_its_choices(reasons, own, vllm):
    instance = metrics()
    instance.on_request_end(report(*reasons))
    samples = scrape(instance)
    ended = {labels: count for (name, labels), count in samples.items() if name == "quire_finished_requests_total"}
    assert ended == {(("finish_reason", own),): 1}
    assert value(instance, "vllm:request_success_total", model_name="tiny", engine="0", finished_reason=vllm) == 1


def test_http_requests_are_counted_once_with_bounded_labels():
    instance = metrics()
    instance.request_ended("/v1/chat/completions", 200, "stop", "")
    instance.request_ended("/v1/chat/completions", 499, "cancelled", "batch")
    instance.request_ended("unknown", 404, "a reason nobody knows", "")
    instance.tokens_used("batch", 7, 3)
    instance.tokens_used("", 7, 3)
    cells = {
        tuple(dict(labels).values()): count
        for (name, labels), count in scrape(instance).items()
        if name == "quire_requests_total"
    }
    assert sum(cells.values()) == 3
    assert ("/v1/chat/completions", "cancelled", "499") in cells
    assert ("unknown", "none", "404") in cells
    assert value(instance, "quire_key_tokens_total", key="batch", kind="prompt") == 7
    assert value(instance, "quire_key_requests_total", key="batch") == 1


def test_gauges_are_read_at_the_scrape():
    state = {"num_running": 4, "num_waiting": 2, "num_referenced": 30}
    instance = Metrics(version="1")
    instance.attach(MODEL, lambda: stats(**state))
    assert value(instance, "quire_requests_running") == 4
    assert value(instance, "quire_kv_usage_ratio") == pytest.approx(0.3)
    assert value(instance, "vllm:kv_cache_usage_perc", model_name="tiny", engine="0") == pytest.approx(0.3)
    state.update(num_running=0, num_waiting=0, num_referenced=0)
    assert value(instance, "quire_requests_running") == value(instance, "quire_requests_waiting") == 0
    assert value(instance, "quire_kv_usage_ratio") == 0
    assert value(instance, "quire_kv_blocks", state="cached") == 10


def test_a_server_without_a_model_can_be_scraped():
    samples = scrape(Metrics(version="1.2.3"))
    assert samples["quire_build_info", (("version", "1.2.3"),)] == 1
    assert not [name for name, _ in samples if name.startswith("vllm:")]


def test_open_files_are_watched():
    assert value(metrics(), "process_open_fds") > 0


def test_a_histogram_counts_upper_bounds_inclusively():
    histogram = Histogram((1, 2.5))
    for observed in (0, 1, 1.1, 2.5, 9):
        histogram.observe(observed)
    histogram.observe(2, count=3)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.5", 7.0), ("+Inf", 8.0)]
    assert histogram.count == 8
    assert histogram.sum == pytest.approx(19.6)


def used(instance):
    instance.request_ended("/v1/completions", 200, "stop", "batch")
    instance.tokens_used("batch", 1, 1)
    instance.on_request_end(report(FinishReason.STOP))
    return instance


def test_own_names_pass_promtool():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    content, _ = used(metrics(vllm_names=False)).render()
    result = subprocess.run([promtool, "check", "metrics"], input=content, capture_output=True, timeout=30)
    assert (result.returncode, result.stdout.decode(), result.stderr.decode()) == (0, "", "")


def test_the_dashboard_names_only_metrics_that_exist():
    exported = {name for name, _ in scrape(used(metrics()))}
    dashboard = json.loads((REPOSITORY / "deploy/grafana/dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for expr in expressions for name in re.findall(r"\b(?:quire|vllm|process)[_:][a-z_:]+", expr)}
    assert len(named) > 20
    assert named <= exported
